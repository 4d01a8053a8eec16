"""Messages between the host and the driver of an interpreter, over a SOCK_SEQPACKET socket.

A message is cut into packets: one byte of flags, the number of bytes that follow in later packets,
and a part of the body. The body is the length of a JSON head, the head, and raw bytes. Everything
that a driver sends is untrusted: sandboxed code shares its process. This module does no input or
output.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from union.sandbox._contexts.values import ErrorInfo, FrameInfo, MimeBundle
from union.sandbox._core.events import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MAX_PACKET",
    "MAX_RESULT_BYTES",
    "Display",
    "Done",
    "Event",
    "FrameError",
    "FrameReader",
    "Ready",
    "Restored",
    "decode",
    "decode_with_head",
    "encode",
    "saved_pid",
]

MAX_PACKET: Final = 64 * 1024
MAX_HEAD_BYTES: Final = 1024 * 1024
MAX_RESULT_BYTES: Final = 16 * 1024 * 1024
"""The limit on all displays of one cell together, and on one value of ``get()``."""
MAX_MESSAGE_BYTES: Final = MAX_RESULT_BYTES + MAX_HEAD_BYTES + 4
MAX_DISPLAYS: Final = 1000
"""The limit on displays of one cell."""
MAX_MIME_TYPES: Final = 32
MAX_FRAMES: Final = 64
_MAX_MIME_CHARS: Final = 128
_MAX_NAME_CHARS: Final = 512
_MAX_TEXT_CHARS: Final = 65_536
_MAX_NUMBER: Final = 2**53
MAX_PID: Final = 2**22
_PACKET: Final = struct.Struct("=BI")
_LENGTH: Final = struct.Struct("=I")
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_DECODER: Final = json.JSONDecoder()
_FIRST: Final = 1


class FrameError(Exception):
    """A driver sent something that is not a message of this protocol."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The driver has started."""


@dataclass(frozen=True, slots=True)
class Display:
    """A cell displayed a value."""

    number: int
    bundle: MimeBundle
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A cell has ended."""

    number: int
    error: ErrorInfo | None
    usage: Usage
    dropped: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A saved interpreter runs again, and waits to replace the present one."""

    number: int
    pid: int
    """Its process id inside the sandbox."""


Event = Ready | Display | Done | Restored


def encode(head: dict[str, Any], raw: bytes = b"") -> Iterator[bytes]:
    """Yield the packets of one message."""
    text = _ENCODER.encode(head).encode("ascii")
    body = _LENGTH.pack(len(text)) + text + raw
    room = MAX_PACKET - _PACKET.size
    for start in range(0, len(body), room):
        part = body[start : start + room]
        left = len(body) - start - len(part)
        yield _PACKET.pack(_FIRST if start == 0 else 0, left) + part


class FrameReader:
    """Assemble messages from packets. Holds at most one message of bounded size."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._left = 0

    def feed(self, packet: bytes) -> bytes | None:
        """Return the body of a message that this packet completes, else None.

        A packet that begins a message discards an incomplete one: its sender may have died. A
        continuation without a beginning is dropped for the same reason.

        Raises:
            FrameError: the packet is malformed, or announces a message that is too large.

        """
        if len(packet) < _PACKET.size:
            raise FrameError(f"a packet of {len(packet)} bytes, expected at least {_PACKET.size}")
        flags, left = _PACKET.unpack_from(packet)
        part = packet[_PACKET.size :]
        if flags not in {0, _FIRST}:
            raise FrameError(f"unknown flags {flags:#x}")
        if left + len(part) > MAX_MESSAGE_BYTES:
            raise FrameError(
                f"a message of {left + len(part)} bytes, the limit is {MAX_MESSAGE_BYTES}"
            )
        if flags == _FIRST:
            self._parts = []
        elif not self._parts or left + len(part) != self._left or not part:
            self._parts = []
            return None
        self._parts.append(part)
        self._left = left
        if left:
            return None
        body = b"".join(self._parts)
        self._parts = []
        return body


def decode(body: bytes) -> Event:
    """Return the event of one message.

    Raises:
        FrameError: the message is malformed.

    """
    return decode_with_head(body)[0]


def decode_with_head(body: bytes) -> tuple[Event, dict[str, Any]]:
    """Return the event of one message, and all fields of its head, most of them unchecked."""
    head, raw = _split(body)
    kind = head.get("t")
    if kind == "ready":
        return Ready(), head
    number = _number(head, "n")
    if kind == "display":
        return Display(number, _bundle(head, raw), len(raw)), head
    if kind == "done":
        return _done(head, raw, number), head
    if kind == "restored":
        return Restored(number, _pid(head)), head
    raise FrameError(f"unknown message {kind!r:.40}")


def _pid(head: dict[str, Any]) -> int:
    pid = _number(head, "pid")
    if not 1 < pid <= MAX_PID:
        raise FrameError(f"pid must be a number from 2 to {MAX_PID}")
    return pid


def saved_pid(value: bytes | None) -> int:
    """Return the process that holds a saved interpreter, from the value of a ``save``.

    Raises:
        FrameError: the value is malformed.

    """
    try:
        found = json.loads(value or b"null")
    except (ValueError, RecursionError) as exc:
        raise FrameError("a saved interpreter without a process") from exc
    return _pid(found if isinstance(found, dict) else {})


def _split(body: bytes) -> tuple[dict[str, Any], bytes]:
    if len(body) < _LENGTH.size:
        raise FrameError("a message without a head")
    (size,) = _LENGTH.unpack_from(body)
    if size > MAX_HEAD_BYTES or size > len(body) - _LENGTH.size:
        raise FrameError(f"a head of {size} bytes in a message of {len(body)} bytes")
    end = _LENGTH.size + size
    try:
        head = _DECODER.decode(body[_LENGTH.size : end].decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise FrameError("the head is not valid JSON") from exc
    if not isinstance(head, dict):
        raise FrameError("the head is not a JSON object")
    return head, body[end:]


def _number(head: dict[str, Any], name: str) -> int:
    found = head.get(name, 0)
    if type(found) is not int or not 0 <= found < _MAX_NUMBER:
        raise FrameError(f"{name} must be a number from 0 to {_MAX_NUMBER}")
    return found


def _text(head: dict[str, Any], name: str, limit: int) -> str:
    found = head.get(name, "")
    if not isinstance(found, str):
        raise FrameError(f"{name} must be a string")
    # A lone surrogate is valid in JSON and in no encoding.
    return found[:limit].encode("utf-8", "replace").decode("utf-8")


def _list(head: dict[str, Any], name: str, limit: int) -> list[Any]:
    found = head.get(name, [])
    if not isinstance(found, list) or len(found) > limit:
        raise FrameError(f"{name} must be a list of at most {limit} elements")
    return found


def _bundle(head: dict[str, Any], raw: bytes) -> MimeBundle:
    data: dict[str, str | bytes] = {}
    start = 0
    for part in _list(head, "parts", MAX_MIME_TYPES):
        if not isinstance(part, dict):
            raise FrameError("a part must be an object")
        mime = _text(part, "mime", _MAX_MIME_CHARS)
        size = _number(part, "size")
        if size > len(raw) - start:
            raise FrameError(f"a part of {size} bytes, {len(raw) - start} are left")
        content = raw[start : start + size]
        start += size
        data[mime] = content if part.get("raw") is True else content.decode("utf-8", "replace")
    if start != len(raw):
        raise FrameError(f"{len(raw) - start} bytes beyond the parts")
    kind: Literal["result", "display"] = "result" if head.get("result") is True else "display"
    return MimeBundle(kind=kind, data=data)


def _done(head: dict[str, Any], raw: bytes, number: int) -> Done:
    found = head.get("error")
    if found is not None and not isinstance(found, dict):
        raise FrameError("error must be an object")
    return Done(
        number=number,
        error=None if found is None else _error(found),
        usage=Usage(
            cpu_user_s=_seconds(head, "user_s"),
            cpu_system_s=_seconds(head, "system_s"),
            max_rss_bytes=_number(head, "rss"),
        ),
        dropped=_number(head, "dropped"),
        value=raw if head.get("value") is True else None,
    )


def _seconds(head: dict[str, Any], name: str) -> float:
    found = head.get(name, 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise FrameError(f"{name} must be a number")
    if not 0 <= found < _MAX_NUMBER:  # false for NaN too
        raise FrameError(f"{name} must be a number of seconds")
    return float(found)


def _error(found: dict[str, Any]) -> ErrorInfo:
    frames = []
    for frame in _list(found, "frames", MAX_FRAMES):
        if not isinstance(frame, dict):
            raise FrameError("a frame must be an object")
        frames.append(
            FrameInfo(
                file=_text(frame, "file", _MAX_NAME_CHARS),
                line=_number(frame, "line"),
                function=_text(frame, "function", _MAX_NAME_CHARS),
                text=_text(frame, "text", _MAX_NAME_CHARS),
            )
        )
    return ErrorInfo(
        name=_text(found, "name", _MAX_NAME_CHARS),
        value=_text(found, "value", _MAX_TEXT_CHARS),
        traceback=_text(found, "traceback", _MAX_TEXT_CHARS),
        frames=tuple(frames),
    )
