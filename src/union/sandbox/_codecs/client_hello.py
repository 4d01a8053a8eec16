"""The server name in a TLS greeting, read from the first bytes of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "MAX_HELLO_BYTES",
    "ClientHello",
    "ClientHelloTracker",
    "TlsFormatError",
    "looks_like_tls",
    "read_hello",
]

MAX_HELLO_BYTES: Final = 32 * 1024
_RECORD_HEADER: Final = 5
_CHANGE_CIPHER_SPEC: Final = 0x14
_ALERT: Final = 0x15
_HANDSHAKE: Final = 0x16
_RECORD_TYPES: Final = frozenset(range(0x14, 0x19))
_SERVER_HELLO: Final = 0x02
_RETRY: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random value by which a ServerHello asks for a second greeting (RFC 8446, 4.1.3)."""
_CLIENT_HELLO: Final = 0x01
_SERVER_NAME: Final = 0x0000
_HOST_NAME: Final = 0x00
_MAX_RECORD_BYTES: Final = 16_384 + 256
_SERVER_HELLO_BYTES: Final = _RECORD_HEADER + 4 + 2 + 32
"""Of a ServerHello: headers, version, random value."""
_MAX_RECORDS: Final = 64
"""The greeting is read again whenever more of it arrives: crumbs must not add up to work."""


class TlsFormatError(ValueError):
    """It began like a TLS greeting and is not one."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """A whole greeting; ``server_name`` is None when it names none."""

    server_name: str | None


def looks_like_tls(data: bytes) -> bool | None:
    """Return whether these first bytes are TLS; None while that cannot be known.

    Servers differ in which record they accept first: some skip a warning alert, some accept any
    low version number in the first record. So this asks what *some* server takes for TLS; only
    what every server takes for a greeting is then accepted by :func:`read_hello`.
    """
    if not data or data[0] not in _RECORD_TYPES:
        return False
    if len(data) < 2:
        return None
    if data[1] == 3:
        return True
    if data[1] >= 0x10 or data[0] not in {_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE}:
        return False
    # Another version. Length-prefixed protocols begin like this too: look into the record.
    if len(data) <= _RECORD_HEADER:
        return None
    length, first = int.from_bytes(data[3:5], "big"), data[5]
    if data[0] == _CHANGE_CIPHER_SPEC:
        return (length, first) == (1, 1)
    if data[0] == _ALERT:
        return length == 2 and first in {1, 2}
    if first != _CLIENT_HELLO or length < 6:
        return first == _CLIENT_HELLO
    return None if len(data) < 10 else data[9] == 3


def read_hello(data: bytes) -> ClientHello | None:
    """Read the greeting; None while it is incomplete.

    Raises:
        TlsFormatError: it is malformed, or larger than any honest one.

    """
    found = _reassemble(data)
    return None if found is None else _parse(found[0])


def _parse(message: bytes) -> ClientHello:
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


def _reassemble(data: bytes) -> tuple[bytes, int] | None:
    """Join the handshake message, which may be cut over several records.

    Returns the message and where its last record ends; None while it is incomplete.
    """
    message = bytearray()
    offset = 0
    for _ in range(_MAX_RECORDS):
        if len(data) < offset + _RECORD_HEADER:
            _check_size(data)
            return None
        kind, major = data[offset], data[offset + 1]
        length = int.from_bytes(data[offset + 3 : offset + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not 1 <= length <= _MAX_RECORD_BYTES:
            raise TlsFormatError("not a handshake record")
        offset += _RECORD_HEADER
        declared = len(message) + length
        message += data[offset : offset + length]
        if message and message[0] != _CLIENT_HELLO:
            raise TlsFormatError("not a client greeting")
        if len(message) >= 4:
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO_BYTES:
                raise TlsFormatError("the TLS greeting is too large")
            if declared > wanted:
                raise TlsFormatError("bytes after the greeting in its record")
            if len(message) == wanted:
                return bytes(message[4:]), offset + length
        if len(data) < offset + length:
            _check_size(data)
            return None
        offset += length
    raise TlsFormatError("the TLS greeting is in too many pieces")


def _check_size(data: bytes) -> None:
    if len(data) > MAX_HELLO_BYTES:
        raise TlsFormatError("the TLS greeting is too large")


class ClientHelloTracker:
    """Follows a client's bytes until no further greeting of it can reach the server.

    A client sends a second greeting if the server asks for one (HelloRetryRequest), and some
    servers choose the host by the name in that second one. So both are read, and the server's
    first answer decides whether a second one can follow. Records of other types before the first
    greeting are an error: some servers skip them.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._to_skip = 0
        self._greetings = 0
        self._records = 0
        self._answer = b""
        self._is_decided = False
        self._is_accepted = False
        self.is_over = False
        """Nothing more has to be read: it is not TLS, or the handshake has gone past it."""

    @property
    def is_waiting(self) -> bool:
        """Whether the bytes end inside something that has to be judged before it is sent on."""
        return not self.is_over and bool(self._pending)

    def feed(self, data: bytes) -> tuple[str, ...]:
        """Read more bytes of the client; return the server names of greetings that are complete.

        Raises:
            TlsFormatError: it is TLS, and not in the form that every server reads alike.

        """
        self._pending += data
        names: list[str] = []
        while self._pending and not self.is_over and self._step(names):
            pass
        return tuple(names)

    def feed_server(self, data: bytes) -> None:
        """Read the first bytes of the server, before they are sent on to the client."""
        if self._is_decided:
            return
        self._answer += data
        while len(self._answer) >= _RECORD_HEADER and self._answer[0] == _ALERT:
            end = _RECORD_HEADER + int.from_bytes(self._answer[3:5], "big")
            if len(self._answer) < end:
                return
            self._answer = self._answer[end:]
        head = self._answer[:_SERVER_HELLO_BYTES]
        if not head:
            return
        if head[0] == _HANDSHAKE and head[5:6] in {b"", bytes((_SERVER_HELLO,))}:
            if len(head) < _SERVER_HELLO_BYTES:
                return
            self._is_accepted = not head.endswith(_RETRY)
        self._is_decided = True
        self._answer = b""

    def _step(self, names: list[str]) -> bool:
        """Consume a part of the pending bytes; False if more are needed."""
        if self._to_skip:
            size = min(self._to_skip, len(self._pending))
            self._to_skip -= size
            self._pending = self._pending[size:]
            return True
        if not self._greetings:
            known = looks_like_tls(self._pending)
            if known is None:
                return False
            if not known:
                self._end()
                return True
        elif self._is_accepted or self._greetings > 1:
            self._end()
            return True
        elif self._pending[0] != _HANDSHAKE:
            return self._skip_record()
        found = _reassemble(self._pending)
        if found is None:
            return False
        hello = _parse(found[0])
        if hello.server_name is not None:
            names.append(hello.server_name)
        self._greetings += 1
        self._pending = self._pending[found[1] :]
        return True

    def _end(self) -> None:
        self.is_over = True
        self._pending = b""

    def _skip_record(self) -> bool:
        """Skip a record between two greetings: a cipher change, an alert, early data."""
        if len(self._pending) < _RECORD_HEADER:
            return False
        kind, major = self._pending[0], self._pending[1]
        length = int.from_bytes(self._pending[3:5], "big")
        self._records += 1
        if kind not in _RECORD_TYPES or major != 3 or length > _MAX_RECORD_BYTES:
            raise TlsFormatError("what follows the greeting is not a TLS record")
        if self._records > _MAX_RECORDS * 16:
            raise TlsFormatError("too many records before the server's answer")
        self._pending = self._pending[_RECORD_HEADER:]
        self._to_skip = length
        return True


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
