"""Strict parsers for HTTP/1 heads and bodies, which leave no room for another interpretation.

A proxy that applies a policy to a request must be sure that the next server parses the same
request. So there is one line ending, one length, one host, no folding and no repair: ambiguous
input is rejected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = [
    "MAX_HEAD_BYTES",
    "ChunkedBody",
    "HttpFormatError",
    "RequestHead",
    "ResponseHead",
    "body_length",
    "encode_head",
    "forwarded_headers",
    "parse_request_head",
    "parse_response_head",
    "split_authority",
]

MAX_HEAD_BYTES: Final = 64 * 1024
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_LENGTH: Final = re.compile(r"[0-9]{1,18}", re.ASCII)
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e]*)?")
_MAX_CHUNK_LINE_BYTES: Final = 1024
_MAX_TRAILER_BYTES: Final = 16 * 1024
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_FRAMING: Final = frozenset({"host", "content-length", "transfer-encoding"})

Headers = tuple[tuple[str, str], ...]


class HttpFormatError(ValueError):
    """The message is not valid or not unambiguous HTTP/1; the text names the violated rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request line and its header fields; field names are lower-case."""

    method: str
    target: str
    minor: int
    headers: Headers

    def values(self, name: str) -> list[str]:
        """Return the values of every field called ``name``."""
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """A status line and its header fields; field names are lower-case."""

    status: int
    reason: str
    minor: int
    headers: Headers


def parse_request_head(data: bytes) -> RequestHead:
    """Parse a request head that ends with its empty line.

    Raises:
        HttpFormatError: it is not strictly well-formed.

    """
    first, headers = _split_head(data)
    parts = first.split(b" ")
    if len(parts) != 3:
        raise HttpFormatError("the request line is not 'method target version'")
    method, target, version = parts
    if _TOKEN.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise HttpFormatError("the request line contains an invalid character")
    if version not in {b"HTTP/1.0", b"HTTP/1.1"}:
        raise HttpFormatError("the version must be HTTP/1.0 or HTTP/1.1")
    return RequestHead(
        method=method.decode("ascii"),
        target=target.decode("ascii"),
        minor=version[-1] - 0x30,
        headers=headers,
    )


def parse_response_head(data: bytes) -> ResponseHead:
    """Parse a response head that ends with its empty line.

    Raises:
        HttpFormatError: it is not strictly well-formed.

    """
    first, headers = _split_head(data)
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise HttpFormatError("the status line is malformed")
    minor, status, reason = match.groups()
    return ResponseHead(
        status=int(status),
        reason=(reason or b"").decode("latin-1"),
        minor=int(minor),
        headers=headers,
    )


def body_length(headers: Headers, *, minor: int) -> int | str | None:
    """Return the length of the body: a number, ``"chunked"``, or None if the head has none.

    Raises:
        HttpFormatError: the head has two framings, or one that is ambiguous.

    """
    lengths = [value for key, value in headers if key == "content-length"]
    encodings = [value for key, value in headers if key == "transfer-encoding"]
    if encodings:
        if lengths or len(encodings) > 1 or encodings[0].lower() != "chunked" or minor == 0:
            raise HttpFormatError("the length of the body is ambiguous")
        return "chunked"
    if not lengths:
        return None
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise HttpFormatError("the length of the body is ambiguous")
    return int(lengths[0])


def forwarded_headers(headers: Headers) -> Headers:
    """Return the fields without those that apply to one hop only.

    Raises:
        HttpFormatError: ``Connection`` names a field that frames the message.

    """
    named = {
        token.strip().lower()
        for key, value in headers
        if key == "connection"
        for token in value.split(",")
    }
    if named & _FRAMING:
        raise HttpFormatError("Connection names a field that frames the request")
    dropped = _HOP_BY_HOP | named
    # Every field that starts with "proxy-" is between one proxy and its client.
    return tuple(
        (key, value)
        for key, value in headers
        if key not in dropped and not key.startswith("proxy-")
    )


def split_authority(text: str, *, default_port: int | None) -> tuple[str, int]:
    """Split ``host:port``.

    Args:
        text: the authority of a request target, or a Host header.
        default_port: port for a text without one; None: a port is required.

    Raises:
        HttpFormatError: it contains user information, no host, or an invalid port.

    """
    if any(c in text for c in "@/\\?#%,"):
        raise HttpFormatError("the authority contains more than a host and a port")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise HttpFormatError("the authority has unmatched brackets")
        port = rest[1:] if rest else None
    else:
        host, colon, tail = text.partition(":")
        port = tail if colon else None
    if not host:
        raise HttpFormatError("the authority has no host")
    if port is None:
        if default_port is None:
            raise HttpFormatError("the authority has no port")
        return host, default_port
    if _PORT.fullmatch(port) is None or not 1 <= int(port) <= 65535:
        raise HttpFormatError("the port is not a number from 1 to 65535")
    return host, int(port)


def encode_head(first: str, headers: Headers) -> bytes:
    """Encode a request or status line with its fields."""
    lines = [first, *(f"{key}: {value}" for key, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class ChunkedBody:
    """Parse a chunked body incrementally and encode it again.

    Extensions and trailers are dropped. ``rest`` holds the bytes after the end of the body.

    Args:
        encode: whether ``feed`` returns chunks (default), or only their content.

    """

    def __init__(self, *, encode: bool = True) -> None:
        self.done = False
        self._encode = encode
        self.rest = b""
        self._buffer = bytearray()
        self._remaining = 0
        self._state = "size"
        self._trailers = 0

    def feed(self, data: bytes) -> bytes:
        """Consume ``data`` and return the bytes that can be forwarded.

        Raises:
            HttpFormatError: the framing is malformed.

        """
        self._buffer += data
        out = bytearray()
        while not self.done and self._step(out):
            pass
        if self.done:
            self.rest = bytes(self._buffer)
            self._buffer.clear()
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        if self._state == "data":
            data = self._buffer[: self._remaining]
            if not data:
                return False
            del self._buffer[: len(data)]
            self._remaining -= len(data)
            out += data
            if not self._remaining:
                self._state = "data-end"
            return True
        if self._state == "data-end":
            if len(self._buffer) < 2:
                return False
            if self._buffer[:2] != b"\r\n":
                raise HttpFormatError("a chunk is longer than its declared size")
            del self._buffer[:2]
            self._frame(out, b"\r\n")
            self._state = "size"
            return True
        line = self._take_line()
        if line is None:
            return False
        if self._state == "size":
            self._parse_size(line, out)
        elif line:
            self._trailers += len(line)
            _parse_field(line)
            if self._trailers > _MAX_TRAILER_BYTES:
                raise HttpFormatError(f"the trailers exceed {_MAX_TRAILER_BYTES} bytes")
        else:
            self._frame(out, b"0\r\n\r\n")
            self.done = True
        return True

    def _frame(self, out: bytearray, data: bytes) -> None:
        if self._encode:
            out += data

    def _parse_size(self, line: bytes, out: bytearray) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise HttpFormatError("a chunk size is malformed")
        self._remaining = int(match[1], 16)
        if self._remaining:
            self._frame(out, b"%x\r\n" % self._remaining)
            self._state = "data"
        else:
            self._state = "trailers"

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                raise HttpFormatError(f"a chunk size line exceeds {_MAX_CHUNK_LINE_BYTES} bytes")
            return None
        if end == 0 or self._buffer[end - 1] != 0x0D:
            raise HttpFormatError("a line ends without CR LF")
        line = bytes(self._buffer[: end - 1])
        del self._buffer[: end + 1]
        return line


def _split_head(data: bytes) -> tuple[bytes, Headers]:
    if not data.endswith(b"\r\n\r\n") or len(data) > MAX_HEAD_BYTES:
        raise HttpFormatError(f"the head has no empty line or exceeds {MAX_HEAD_BYTES} bytes")
    first, *lines = data[:-4].split(b"\r\n")
    if any(character in first for character in b"\r\n\0"):
        raise HttpFormatError("a line ends without CR LF")
    return first, tuple(_parse_field(line) for line in lines)


def _parse_field(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    # A space before the colon or at the start of a line (folding) is not part of a token.
    if not colon or _TOKEN.fullmatch(name) is None:
        raise HttpFormatError("a header field has no valid name")
    if _VALUE.fullmatch(value) is None:
        raise HttpFormatError("a header field contains a control character")
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
