"""The wire between a remote session and its server: frames, and nothing else.

A message is one frame or several, one behind the other. A frame is a head of 13 bytes (kind, run,
size; big-endian) and a payload. Frames of one run are in order; runs share one connection. What a
payload holds is told by its kind. Everything has an upper bound, and whatever is not exactly as
described here is a ``WireError``: the connection that brought it is closed.

``docs/reference/wire.md`` is the same for people.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MAX_CHUNK",
    "MAX_MESSAGE",
    "PROTOCOL",
    "STDIN_WINDOW",
    "VERSION",
    "WINDOW",
    "Frame",
    "Kind",
    "Offsets",
    "Taken",
    "WireError",
    "decode",
    "decode_numbered",
    "decode_offsets",
    "decode_output",
    "decode_start",
    "decode_taken",
    "encode",
    "encode_numbered",
    "encode_offsets",
    "encode_output_head",
    "encode_start",
    "encode_taken",
    "parse_json",
    "to_json",
]

VERSION: Final = 1
"""Changes when an old peer could misread a new one."""
PROTOCOL: Final = f"union-sandbox.{VERSION}"
"""The WebSocket subprotocol; a peer that speaks another version is refused at the handshake."""
MAX_CHUNK: Final = 256 * 1024
"""The most data that one frame carries."""
MAX_MESSAGE: Final = 1024 * 1024
"""The most that one message may take, all its frames together."""
WINDOW: Final = 4 * 1024 * 1024
"""What of one stream of output may be under way, or kept for a client that was cut off."""
STDIN_WINDOW: Final = 1024 * 1024
"""What of stdin may be under way that the command did not take."""

_HEAD: Final = struct.Struct(">BQI")
_OUTPUT: Final = struct.Struct(">BQ")
_NUMBER: Final = struct.Struct(">I")
_OFFSETS: Final = struct.Struct(">QQI")
_TAKEN: Final = struct.Struct(">IQB")
_PART: Final = struct.Struct(">IB")
_MOST_JSON: Final = MAX_CHUNK
"""Of a frame that is JSON; a start, which may be larger, comes in parts."""


class WireError(ValueError):
    """What came is not of this protocol."""


class Kind(enum.IntEnum):
    """What a frame is about. Below 64: from the client; from 64 on: from the server."""

    START = 1
    """A part of a run's description. A run that is known already is attached to instead."""
    STDIN = 2
    """A number, and bytes for the command's stdin."""
    CONTROL = 3
    """A number, and what to do: a signal, the end of stdin, a new window size."""
    ACK = 4
    """How much of each stream, and how many events, need not be kept any more."""
    ATTACH = 5
    """The client is back; it has this much of each stream and this many events."""
    CLOSE = 6
    """End the session (run 0)."""

    OUTPUT = 64
    """Stream, offset, bytes."""
    END_OF_OUTPUT = 65
    """Stream, and the offset at which it ended."""
    EVENT = 66
    """A number, and what happened: started, refused, a network decision, exited, failed."""
    TAKEN = 67
    """The highest number received, how much of stdin the command took, whether it still reads."""
    UNKNOWN = 68
    """No such run here (any more)."""
    CLOSED = 69
    """The session has ended and everything it had to say was said (run 0)."""


_BY_NUMBER: Final = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, its payload not looked at yet."""

    kind: Kind
    run: int
    payload: memoryview
    """A view of the message: bytes are copied once, by whoever keeps them."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far each stream, and the list of events, is known."""

    stdout: int = 0
    stderr: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """What the server has of what the client sent for one run."""

    number: int
    stdin: int
    broken: bool


def encode(kind: Kind, run: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, run, len(payload)) + payload


def decode(message: bytes) -> Iterator[Frame]:
    """The frames of one message.

    Raises:
        WireError: as soon as something is not a frame.

    """
    if len(message) > MAX_MESSAGE:
        raise WireError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE} are accepted")
    at = 0
    view = memoryview(message)
    while at < len(message):
        if len(message) - at < _HEAD.size:
            raise WireError("a frame's head is cut short")
        kind, run, size = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        if kind not in _BY_NUMBER:
            raise WireError(f"frames of kind {kind} do not exist")
        if size > len(message) - at:
            raise WireError("a frame is cut short")
        yield Frame(_BY_NUMBER[kind], run, view[at : at + size])
        at += size


# Payloads.


def encode_output_head(run: int, fd: int, offset: int, size: int) -> bytes:
    """What comes before the bytes of an OUTPUT frame; those follow as they are, without a copy."""
    return _HEAD.pack(Kind.OUTPUT, run, _OUTPUT.size + size) + _OUTPUT.pack(fd, offset)


def encode_end_of_output(run: int, fd: int, offset: int) -> bytes:
    return encode(Kind.END_OF_OUTPUT, run, _OUTPUT.pack(fd, offset))


def decode_output(payload: memoryview) -> tuple[int, int, memoryview]:
    """Stream, offset and bytes, of OUTPUT and of END_OF_OUTPUT."""
    if not _OUTPUT.size <= len(payload) <= _OUTPUT.size + MAX_CHUNK:
        raise WireError(f"{len(payload)} bytes are no piece of output")
    fd, offset = _OUTPUT.unpack_from(payload)
    if fd not in {1, 2}:
        raise WireError(f"stream {fd} does not exist")
    return fd, offset, payload[_OUTPUT.size :]


def encode_numbered(kind: Kind, run: int, number: int, data: bytes) -> bytes:
    """A whole STDIN, CONTROL or EVENT frame."""
    return encode(kind, run, _NUMBER.pack(number) + data)


def decode_numbered(payload: memoryview) -> tuple[int, bytes]:
    if not _NUMBER.size <= len(payload) <= _NUMBER.size + MAX_CHUNK:
        raise WireError(f"{len(payload)} bytes do not start with a number, or are too many")
    return _NUMBER.unpack_from(payload)[0], bytes(payload[_NUMBER.size :])


def encode_offsets(kind: Kind, run: int, known: Offsets) -> bytes:
    """A whole ACK or ATTACH frame."""
    return encode(kind, run, _OFFSETS.pack(known.stdout, known.stderr, known.events))


def decode_offsets(payload: memoryview) -> Offsets:
    if len(payload) != _OFFSETS.size:
        raise WireError(f"offsets take {_OFFSETS.size} bytes, not {len(payload)}")
    return Offsets(*_OFFSETS.unpack(payload))


def encode_taken(run: int, value: Taken) -> bytes:
    """A whole TAKEN frame."""
    return encode(Kind.TAKEN, run, _TAKEN.pack(value.number, value.stdin, value.broken))


def decode_taken(payload: memoryview) -> Taken:
    if len(payload) != _TAKEN.size:
        raise WireError(f"what was taken is told in {_TAKEN.size} bytes, not {len(payload)}")
    number, stdin, broken = _TAKEN.unpack(payload)
    if broken > 1:
        raise WireError(f"{broken} is neither yes nor no")
    return Taken(number, stdin, bool(broken))


def encode_start(run: int, body: bytes) -> list[bytes]:
    """The START frames that carry ``body``: each says where it begins and whether it is the last.

    A part that begins at 0 starts the description anew, so sending it twice does no harm.
    """
    found = []
    for at in range(0, max(len(body), 1), MAX_CHUNK):
        last = at + MAX_CHUNK >= len(body)
        payload = _PART.pack(at, last) + body[at : at + MAX_CHUNK]
        found.append(encode(Kind.START, run, payload))
    return found


def decode_start(payload: memoryview) -> tuple[int, bool, bytes]:
    """Where a part begins, whether it is the last, and its bytes."""
    if not _PART.size <= len(payload) <= _PART.size + MAX_CHUNK:
        raise WireError(f"{len(payload)} bytes are no part of a start")
    at, last = _PART.unpack_from(payload)
    if last > 1:
        raise WireError(f"{last} is neither yes nor no")
    return at, bool(last), bytes(payload[_PART.size :])


def to_json(value: Any) -> bytes:
    """Plain values as JSON; bytes that are not text travel as lone surrogates, escaped."""
    return _ENCODER.encode(value).encode("ascii")


def parse_json(data: bytes, *, most: int = _MOST_JSON) -> dict[str, Any]:
    """A JSON object.

    Raises:
        WireError: it is something else, larger than ``most``, or nested out of measure.

    """
    if len(data) > most:
        raise WireError(f"{len(data)} bytes of JSON; at most {most} are accepted")
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as exc:
        raise WireError(f"this is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise WireError("a JSON object is wanted")
    return value


def _no_constant(text: str) -> None:
    raise WireError(f"{text} is not JSON")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
