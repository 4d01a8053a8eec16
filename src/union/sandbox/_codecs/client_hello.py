"""Parse the server name of a TLS ClientHello from the first bytes of a connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "MAX_HELLO_BYTES",
    "ClientHello",
    "ClientHelloTracker",
    "TlsFormatError",
    "looks_like_tls",
    "parse_client_hello",
]

MAX_HELLO_BYTES: Final = 32 * 1024
_RECORD_HEADER: Final = 5
_CHANGE_CIPHER_SPEC: Final = 0x14
_ALERT: Final = 0x15
_HANDSHAKE: Final = 0x16
_RECORD_TYPES: Final = frozenset(range(0x14, 0x19))
_SERVER_HELLO: Final = 0x02
_RETRY_RANDOM: Final = bytes.fromhex(
    "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c"
)
"""The random value that marks a ServerHello as HelloRetryRequest (RFC 8446, 4.1.3)."""
_CLIENT_HELLO: Final = 0x01
_SERVER_NAME: Final = 0x0000
_HOST_NAME: Final = 0x00
_PROTOCOLS: Final = 0x0010
_MAX_RECORD_BYTES: Final = 16_384 + 256
_SERVER_HELLO_BYTES: Final = _RECORD_HEADER + 4 + 2 + 32
"""Record header, handshake header, version and random value of a ServerHello."""
_MAX_RECORDS: Final = 64
"""The ClientHello is parsed again whenever more of it arrives, so tiny records must be bounded."""


class TlsFormatError(ValueError):
    """The bytes start like TLS but are not a ClientHello in its standard form."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """A complete ClientHello; ``server_name`` is None if it has none."""

    server_name: str | None
    protocols: tuple[str, ...] = field(default=(), compare=False)
    """The application protocols that the client offers (ALPN), such as ``h2``."""


def looks_like_tls(data: bytes) -> bool | None:
    """Return whether these first bytes are TLS; None while that is undecided.

    Servers differ in which record they accept first: some skip a warning alert, some accept any
    low version number in the first record. So this returns True for bytes that *some* server
    accepts as TLS; :func:`parse_client_hello` then accepts only what *every* server accepts.
    """
    if not data or data[0] not in _RECORD_TYPES:
        return False
    if len(data) < 2:
        return None
    if data[1] == 3:
        return True
    if data[1] >= 0x10 or data[0] not in {_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE}:
        return False
    # Another version. Length-prefixed protocols start like this too, so check the content.
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


def parse_client_hello(data: bytes) -> ClientHello | None:
    """Parse a ClientHello; None while it is incomplete.

    Raises:
        TlsFormatError: it is malformed or larger than ``MAX_HELLO_BYTES``.

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
    protocols: tuple[str, ...] = ()
    while not extensions.at_end():
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind == _SERVER_NAME:
            if found is not None:
                raise TlsFormatError("two server name extensions")
            found = body
        elif kind == _PROTOCOLS:
            protocols = _protocols(body)
    return ClientHello(None if found is None else _host_name(found), protocols)


def _protocols(body: bytes) -> tuple[str, ...]:
    """Return the offered protocols; none if they are malformed, which the server rejects."""
    found = []
    try:
        names = _Cursor(_Cursor(body).vector(2))
        while not names.at_end():
            found.append(names.vector(1).decode("latin-1"))
    except TlsFormatError:
        return ()
    return tuple(found)


def _host_name(body: bytes) -> str:
    outer = _Cursor(body)
    names = _Cursor(outer.vector(2))
    kind = names.number(1)
    value = names.vector(2)
    # Clients send one entry of one kind. Some servers would use a second one.
    if not outer.at_end() or not names.at_end() or kind != _HOST_NAME:
        raise TlsFormatError("the server name extension does not have exactly one host name")
    try:
        return value.decode("ascii")
    except UnicodeDecodeError as exc:
        raise TlsFormatError("the server name is not ASCII") from exc


def _reassemble(data: bytes) -> tuple[bytes, int] | None:
    """Join the handshake message, which may span several records.

    Return the message and the offset after its last record; None while it is incomplete.
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
            raise TlsFormatError("not a ClientHello")
        if len(message) >= 4:
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO_BYTES:
                raise TlsFormatError(f"the ClientHello is larger than {MAX_HELLO_BYTES} bytes")
            if declared > wanted:
                raise TlsFormatError("bytes after the ClientHello in its record")
            if len(message) == wanted:
                return bytes(message[4:]), offset + length
        if len(data) < offset + length:
            _check_size(data)
            return None
        offset += length
    raise TlsFormatError(f"the ClientHello spans more than {_MAX_RECORDS} records")


def _check_size(data: bytes) -> None:
    if len(data) > MAX_HELLO_BYTES:
        raise TlsFormatError(f"the ClientHello is larger than {MAX_HELLO_BYTES} bytes")


class ClientHelloTracker:
    """Parse a client's bytes until no further ClientHello can reach the server.

    A client sends a second ClientHello after a HelloRetryRequest, and some servers select the
    host by the name in the second one. So both are parsed, and the server's first message decides
    whether a second one can follow. Records of other types before the first ClientHello are an
    error, because some servers skip them.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._to_skip = 0
        self._hellos = 0
        self._records = 0
        self._server_bytes = b""
        self._is_decided = False
        self._is_accepted = False
        self.is_over = False
        """No further bytes need parsing: it is not TLS, or no further ClientHello can follow."""

    @property
    def is_waiting(self) -> bool:
        """Whether the bytes end inside a record that must be checked before it is forwarded."""
        return not self.is_over and bool(self._pending)

    def feed(self, data: bytes) -> tuple[str, ...]:
        """Parse more client bytes; return the server names of complete ClientHellos.

        Raises:
            TlsFormatError: it is TLS in a form that servers parse differently.

        """
        self._pending += data
        names: list[str] = []
        while self._pending and not self.is_over and self._step(names):
            pass
        return tuple(names)

    def feed_server(self, data: bytes) -> None:
        """Parse the first bytes of the server, before they are forwarded to the client."""
        if self._is_decided:
            return
        self._server_bytes += data
        while len(self._server_bytes) >= _RECORD_HEADER and self._server_bytes[0] == _ALERT:
            end = _RECORD_HEADER + int.from_bytes(self._server_bytes[3:5], "big")
            if len(self._server_bytes) < end:
                return
            self._server_bytes = self._server_bytes[end:]
        head = self._server_bytes[:_SERVER_HELLO_BYTES]
        if not head:
            return
        if head[0] == _HANDSHAKE and head[5:6] in {b"", bytes((_SERVER_HELLO,))}:
            if len(head) < _SERVER_HELLO_BYTES:
                return
            self._is_accepted = not head.endswith(_RETRY_RANDOM)
        self._is_decided = True
        self._server_bytes = b""

    def _step(self, names: list[str]) -> bool:
        """Consume a part of the pending bytes; False if more are needed."""
        if self._to_skip:
            size = min(self._to_skip, len(self._pending))
            self._to_skip -= size
            self._pending = self._pending[size:]
            return True
        if not self._hellos:
            known = looks_like_tls(self._pending)
            if known is None:
                return False
            if not known:
                self._end()
                return True
        elif self._is_accepted or self._hellos > 1:
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
        self._hellos += 1
        self._pending = self._pending[found[1] :]
        return True

    def _end(self) -> None:
        self.is_over = True
        self._pending = b""

    def _skip_record(self) -> bool:
        """Skip a record between two ClientHellos: a cipher change, an alert, early data."""
        if len(self._pending) < _RECORD_HEADER:
            return False
        kind, major = self._pending[0], self._pending[1]
        length = int.from_bytes(self._pending[3:5], "big")
        self._records += 1
        if kind not in _RECORD_TYPES or major != 3 or length > _MAX_RECORD_BYTES:
            raise TlsFormatError("the bytes after the ClientHello are not a TLS record")
        if self._records > _MAX_RECORDS * 16:
            raise TlsFormatError("too many records before the server's first message")
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
        data = self._data[self._at : self._at + size]
        if len(data) != size:
            raise TlsFormatError("a field extends past the end of the message")
        self._at += size
        return data

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))
