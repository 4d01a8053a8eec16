"""The server name in a TLS greeting, read from the first bytes of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_HELLO_BYTES", "ClientHello", "TlsFormatError", "looks_like_tls", "read_hello"]

MAX_HELLO_BYTES: Final = 32 * 1024
_RECORD_HEADER: Final = 5
_HANDSHAKE: Final = 0x16
_CLIENT_HELLO: Final = 0x01
_SERVER_NAME: Final = 0x0000
_HOST_NAME: Final = 0x00
_LARGEST_RECORD: Final = 16_384 + 256
_MOST_RECORDS: Final = 64
"""The greeting is read again whenever more of it arrives: crumbs must not add up to work."""


class TlsFormatError(ValueError):
    """It began like a TLS greeting and is not one."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """A whole greeting; ``server_name`` is None when it names none."""

    server_name: str | None


def looks_like_tls(data: bytes) -> bool:
    """Whether these first bytes are, or may become, a TLS handshake record."""
    return data[:1] == b"\x16" and data[1:2] in {b"", b"\x03"}


def read_hello(data: bytes) -> ClientHello | None:
    """Read the greeting; None while it is incomplete.

    Raises:
        TlsFormatError: it is malformed, or larger than any honest one.

    """
    message = _reassemble(data)
    if message is None:
        if len(data) > MAX_HELLO_BYTES:
            raise TlsFormatError("the TLS greeting is too large")
        return None
    cursor = _Cursor(message)
    cursor.take(2 + 32)  # version and random
    cursor.vector(1)  # session id
    cursor.vector(2)  # cipher suites
    cursor.vector(1)  # compression methods
    if cursor.at_end():
        return ClientHello(None)
    extensions = _Cursor(cursor.vector(2))
    if not cursor.at_end():
        raise TlsFormatError("bytes after the extensions")
    found: bytes | None = None
    while not extensions.at_end():
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind == _SERVER_NAME:
            if found is not None:
                raise TlsFormatError("two server names")
            found = body
    return ClientHello(None if found is None else _host_name(found))


def _host_name(body: bytes) -> str:
    outer = _Cursor(body)
    names = _Cursor(outer.vector(2))
    kind = names.number(1)
    value = names.vector(2)
    # One entry of one kind is all that was ever used; a second one would be read by some servers.
    if not outer.at_end() or not names.at_end() or kind != _HOST_NAME:
        raise TlsFormatError("an unusual server name extension")
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as exc:
        raise TlsFormatError("a server name that is not ASCII") from exc


def _reassemble(data: bytes) -> bytes | None:
    """Join the handshake message, which may be cut over several records."""
    message = bytearray()
    offset = 0
    for _ in range(_MOST_RECORDS):
        if len(data) < offset + _RECORD_HEADER:
            return None
        kind, major = data[offset], data[offset + 1]
        length = int.from_bytes(data[offset + 3 : offset + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not 1 <= length <= _LARGEST_RECORD:
            raise TlsFormatError("not a handshake record")
        offset += _RECORD_HEADER
        message += data[offset : offset + length]
        if message and message[0] != _CLIENT_HELLO:
            raise TlsFormatError("not a client greeting")
        if len(message) >= 4:
            wanted = int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO_BYTES:
                raise TlsFormatError("the TLS greeting is too large")
            if len(message) >= 4 + wanted:
                return bytes(message[4 : 4 + wanted])
        if len(data) < offset + length:
            return None
        offset += length
    raise TlsFormatError("the TLS greeting is in too many pieces")


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise TlsFormatError("a field runs past the end")
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))
