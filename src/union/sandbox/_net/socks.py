"""The SOCKS5 proxy (RFC 1928). It serves CONNECT by name or address, and nothing else."""

from __future__ import annotations

import asyncio
import functools
import hmac
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._net.ledger import Attempt
from union.sandbox._net.relay import tunnel
from union.sandbox._net.stream import EndOfStreamError
from union.sandbox._policy.addresses import canonical
from union.sandbox._policy.rules import Verdict

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from union.sandbox._net.connection import Connection
    from union.sandbox._net.stream import Stream

__all__ = ["SocksFrontend"]

_HANDSHAKE_TIMEOUT_S: Final = 10.0
_NO_AUTHENTICATION: Final = 0
_PASSWORD: Final = 2
_NO_METHOD: Final = 0xFF
_CONNECT: Final = 1

_GRANTED: Final = 0
_FAILED: Final = 1
_NOT_ALLOWED: Final = 2
_UNREACHABLE: Final = 4
_CONNECTION_REFUSED: Final = 5
_COMMAND_UNKNOWN: Final = 7
_ADDRESS_UNKNOWN: Final = 8


class _ProtocolError(Exception):
    """The client violated the protocol; ``code`` is the reply to send, None: no reply."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class SocksFrontend:
    """Serve one SOCKS5 client per connection.

    Args:
        credentials: ``user:password`` that clients must send; None: none.

    """

    name: Final = "socks"

    def __init__(self, credentials: str | None) -> None:
        self._credentials = None if credentials is None else credentials.encode()

    def destination_of(self, _sock: socket.socket) -> tuple[str, int]:
        """Return no destination: it is unknown before the request."""
        return "", 0

    async def serve(self, connection: Connection) -> None:
        """Perform the handshake, check the destination, dial and relay."""
        stream = connection.stream
        attempt = Attempt(frontend="socks", host="", port=0)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await self._authenticate(stream)
                attempt.host, attempt.port = await self._read_request(stream)
        except _ProtocolError as exc:
            attempt.verdict = Verdict(allowed=False, rule="syntax", reason=f"SOCKS: {exc}")
            connection.begin_attempt(attempt)
            if exc.code is not None:
                await self._reply(stream, exc.code)
            await connection.linger()
            return
        except (EndOfStreamError, TimeoutError):
            return
        connection.begin_attempt(attempt)
        connection.request_received()
        serve: Callable[[], Awaitable[None]]
        bound = connection.policy.binding(attempt.host, attempt.port)
        try:
            if bound is not None:
                serve = connection.intercept(attempt, bound).serve
            else:
                outbound = await connection.dial(attempt)
                serve = functools.partial(
                    tunnel, stream, outbound, attempt, policy=connection.policy
                )
        except RefusedError:
            await self._reply(stream, _NOT_ALLOWED)
            await connection.linger()
            return
        except DialError as exc:
            await self._reply(stream, _CONNECTION_REFUSED if exc.refused else _UNREACHABLE)
            await connection.linger()
            return
        await self._reply(stream, _GRANTED)
        await serve()

    async def _authenticate(self, stream: Stream) -> None:
        version, count = await stream.read_exactly(2)
        if version != 5:
            raise _ProtocolError(f"version {version} instead of 5")
        methods = await stream.read_exactly(count)
        wanted = _NO_AUTHENTICATION if self._credentials is None else _PASSWORD
        if wanted not in methods:
            await stream.send(bytes((5, _NO_METHOD)))
            raise _ProtocolError(f"the client does not offer authentication method {wanted}")
        await stream.send(bytes((5, wanted)))
        if self._credentials is None:
            return
        version, length = await stream.read_exactly(2)
        username = await stream.read_exactly(length)
        password = await stream.read_exactly((await stream.read_exactly(1))[0])
        if version != 1 or not hmac.compare_digest(username + b":" + password, self._credentials):
            await stream.send(b"\x01\x01")
            raise _ProtocolError("wrong user name or password")
        await stream.send(b"\x01\x00")

    async def _read_request(self, stream: Stream) -> tuple[str, int]:
        version, command, reserved, kind = await stream.read_exactly(4)
        if version != 5 or reserved != 0:
            raise _ProtocolError("malformed request", code=_FAILED)
        if kind == 1:
            host = str(IPv4Address(await stream.read_exactly(4)))
        elif kind == 4:
            host = str(canonical(IPv6Address(await stream.read_exactly(16))))
        elif kind == 3:
            raw = await stream.read_exactly((await stream.read_exactly(1))[0])
            # Clients send non-ASCII names as UTF-8; the policy normalises or refuses them.
            host = raw.decode("utf-8", "backslashreplace")
        else:
            raise _ProtocolError(f"unknown address type {kind}", code=_ADDRESS_UNKNOWN)
        port = int.from_bytes(await stream.read_exactly(2), "big")
        if command != _CONNECT:
            raise _ProtocolError(
                f"command {command} is not supported, only CONNECT", code=_COMMAND_UNKNOWN
            )
        if port == 0:
            raise _ProtocolError("port 0 is not a valid destination", code=_FAILED)
        return host, port

    async def _reply(self, stream: Stream, code: int) -> None:
        await stream.send(bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0)))
