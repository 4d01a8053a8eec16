"""The frames that a remote session and its server exchange.

A message is a sequence of one or more frames. A frame is a header of 13 bytes (kind, run, size;
big-endian) and a payload, whose format depends on the kind. Frames of one run are in order; runs
share one connection. Every size has an upper bound. Anything that is not exactly as described here
is a ``WireError``, and its connection is closed.

``docs/reference/wire.md`` describes the same protocol.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "MAX_CHUNK",
    "MAX_MESSAGE",
    "MESSAGES",
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
"""The WebSocket subprotocol; a peer with another version is refused at the handshake."""
MAX_CHUNK: Final = 256 * 1024
"""The most data that one frame carries."""
MAX_MESSAGE: Final = 1024 * 1024
"""The most bytes of one message, all its frames together."""
WINDOW: Final = 4 * 1024 * 1024
"""The most bytes of one output stream in flight, or kept for a client that lost its connection."""
MESSAGES: Final = 3
"""The stream of a cell with its displays and its end; 1 and 2 are stdout and stderr."""
STDIN_WINDOW: Final = 1024 * 1024
"""The most bytes of stdin in flight that the command has not read."""

_HEAD: Final = struct.Struct(">BQI")
_OUTPUT: Final = struct.Struct(">BQ")
_NUMBER: Final = struct.Struct(">I")
_OFFSETS: Final = struct.Struct(">QQI")
_CELL_OFFSETS: Final = struct.Struct(">QQIQ")
_TAKEN: Final = struct.Struct(">IQB")
_PART: Final = struct.Struct(">IB")
_MAX_JSON: Final = MAX_CHUNK
"""The most bytes of a JSON frame; a START, which may be larger, is sent in parts."""


class WireError(ValueError):
    """The peer sent data that violates the protocol."""


class Kind(enum.IntEnum):
    """The kind of a frame. Below 64: from the client; from 64 on: from the server."""

    START = 1
    """A part of a run's description. For a run that already exists, it acts as an ATTACH."""
    STDIN = 2
    """A number, and bytes for the command's stdin."""
    CONTROL = 3
    """A number, and an operation: a signal, the end of stdin, a new window size."""
    ACK = 4
    """How much of each stream, and how many events, the server may drop."""
    ATTACH = 5
    """The client has reconnected; it has this much of each stream and this many events."""
    CLOSE = 6
    """End the session (run 0)."""

    OUTPUT = 64
    """Stream, offset, bytes."""
    END_OF_OUTPUT = 65
    """Stream, and the offset at which it ended."""
    EVENT = 66
    """A number, and an event: started, refused, a network decision, exited, failed."""
    TAKEN = 67
    """The highest number received, how much of stdin the command read, whether it still reads."""
    UNKNOWN = 68
    """The server has no such run, or has it no longer."""
    CLOSED = 69
    """The session has ended and everything about it was sent (run 0)."""


_BY_NUMBER: Final = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, its payload not decoded yet."""

    kind: Kind
    run: int
    payload: memoryview
    """A view of the message: bytes are copied once, where they are kept."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """How much of each stream, and how many events, a side has."""

    stdout: int = 0
    stderr: int = 0
    events: int = 0
    messages: int = 0
    """Bytes of the message stream of a cell."""

    @property
    def streams(self) -> tuple[tuple[int, int], ...]:
        """Each stream with its offset."""
        return (1, self.stdout), (2, self.stderr), (MESSAGES, self.messages)

    @classmethod
    def of(cls, streams: Mapping[int, int], events: int) -> Offsets:
        return cls(streams.get(1, 0), streams.get(2, 0), events, streams.get(MESSAGES, 0))


@dataclass(frozen=True, slots=True)
class Taken:
    """How much the server has received of what the client sent for one run."""

    number: int
    stdin: int
    broken: bool


def encode(kind: Kind, run: int = 0, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return _HEAD.pack(kind, run, len(payload)) + payload


def decode(message: bytes) -> Iterator[Frame]:
    """Yield the frames of one message.

    Raises:
        WireError: at the first data that is not a frame.

    """
    if len(message) > MAX_MESSAGE:
        raise WireError(f"a message has at most {MAX_MESSAGE} bytes, got {len(message)}")
    at = 0
    view = memoryview(message)
    while at < len(message):
        if len(message) - at < _HEAD.size:
            raise WireError("truncated frame header")
        kind, run, size = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        if kind not in _BY_NUMBER:
            raise WireError(f"unknown frame kind {kind}")
        if size > len(message) - at:
            raise WireError("truncated frame")
        yield Frame(_BY_NUMBER[kind], run, view[at : at + size])
        at += size


# Payloads.


def encode_output_head(run: int, fd: int, offset: int, size: int) -> bytes:
    """Encode all of an OUTPUT frame but its data, which the caller appends without a copy."""
    return _HEAD.pack(Kind.OUTPUT, run, _OUTPUT.size + size) + _OUTPUT.pack(fd, offset)


def encode_end_of_output(run: int, fd: int, offset: int) -> bytes:
    return encode(Kind.END_OF_OUTPUT, run, _OUTPUT.pack(fd, offset))


def decode_output(payload: memoryview) -> tuple[int, int, memoryview]:
    """Return stream, offset and bytes of an OUTPUT or END_OF_OUTPUT frame."""
    if not _OUTPUT.size <= len(payload) <= _OUTPUT.size + MAX_CHUNK:
        raise WireError(
            f"OUTPUT payload must be {_OUTPUT.size} to {_OUTPUT.size + MAX_CHUNK} bytes, "
            f"got {len(payload)}"
        )
    fd, offset = _OUTPUT.unpack_from(payload)
    if fd not in {1, 2, MESSAGES}:
        raise WireError(f"stream must be 1, 2 or {MESSAGES}, got {fd}")
    return fd, offset, payload[_OUTPUT.size :]


def encode_numbered(kind: Kind, run: int, number: int, data: bytes) -> bytes:
    """Encode a STDIN, CONTROL or EVENT frame."""
    return encode(kind, run, _NUMBER.pack(number) + data)


def decode_numbered(payload: memoryview) -> tuple[int, bytes]:
    if not _NUMBER.size <= len(payload) <= _NUMBER.size + MAX_CHUNK:
        raise WireError(
            f"numbered payload must be {_NUMBER.size} to {_NUMBER.size + MAX_CHUNK} bytes, "
            f"got {len(payload)}"
        )
    return _NUMBER.unpack_from(payload)[0], bytes(payload[_NUMBER.size :])


def encode_offsets(kind: Kind, run: int, known: Offsets) -> bytes:
    """Encode an ACK or ATTACH frame."""
    payload = _OFFSETS.pack(known.stdout, known.stderr, known.events)
    if known.messages:
        payload = _CELL_OFFSETS.pack(known.stdout, known.stderr, known.events, known.messages)
    return encode(kind, run, payload)


def decode_offsets(payload: memoryview) -> Offsets:
    if len(payload) == _CELL_OFFSETS.size:
        return Offsets(*_CELL_OFFSETS.unpack(payload))
    if len(payload) != _OFFSETS.size:
        raise WireError(
            f"offsets payload must be {_OFFSETS.size} or {_CELL_OFFSETS.size} bytes, "
            f"got {len(payload)}"
        )
    return Offsets(*_OFFSETS.unpack(payload))


def encode_taken(run: int, value: Taken) -> bytes:
    """Encode a TAKEN frame."""
    return encode(Kind.TAKEN, run, _TAKEN.pack(value.number, value.stdin, value.broken))


def decode_taken(payload: memoryview) -> Taken:
    if len(payload) != _TAKEN.size:
        raise WireError(f"TAKEN payload must be {_TAKEN.size} bytes, got {len(payload)}")
    number, stdin, broken = _TAKEN.unpack(payload)
    if broken > 1:
        raise WireError(f"boolean must be 0 or 1, got {broken}")
    return Taken(number, stdin, bool(broken))


def encode_start(run: int, body: bytes) -> list[bytes]:
    """Encode ``body`` as START frames; each holds its offset and whether it is the last.

    A part at offset 0 replaces earlier parts, so sending a description twice is safe.
    """
    found = []
    for at in range(0, max(len(body), 1), MAX_CHUNK):
        last = at + MAX_CHUNK >= len(body)
        payload = _PART.pack(at, last) + body[at : at + MAX_CHUNK]
        found.append(encode(Kind.START, run, payload))
    return found


def decode_start(payload: memoryview) -> tuple[int, bool, bytes]:
    """Return the offset of a START part, whether it is the last, and its bytes."""
    if not _PART.size <= len(payload) <= _PART.size + MAX_CHUNK:
        raise WireError(
            f"START payload must be {_PART.size} to {_PART.size + MAX_CHUNK} bytes, "
            f"got {len(payload)}"
        )
    at, last = _PART.unpack_from(payload)
    if last > 1:
        raise WireError(f"boolean must be 0 or 1, got {last}")
    return at, bool(last), bytes(payload[_PART.size :])


def to_json(value: Any) -> bytes:
    """Encode plain values as JSON; undecodable bytes are sent as escaped lone surrogates."""
    return _ENCODER.encode(value).encode("ascii")


def parse_json(data: bytes, *, max_bytes: int = _MAX_JSON) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        WireError: ``data`` is no JSON object, larger than ``max_bytes``, or nested too deeply.

    """
    if len(data) > max_bytes:
        raise WireError(f"JSON must have at most {max_bytes} bytes, got {len(data)}")
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as exc:
        raise WireError(f"invalid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _no_constant(text: str) -> None:
    raise WireError(f"invalid JSON: {text}")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
