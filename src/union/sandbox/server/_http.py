"""HTTP plumbing: the protocol of a connection, the bodies of requests, the headers of responses.

For a malformed request, the HTTP library would send and log the bytes that it could not parse,
which may be the caller's token. Here the response and the log entry only report that it was
malformed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import parse_json, to_json
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox.server._auth import Grant
    from union.sandbox.server._connections import Connection, ConnectionLimiter
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._quotas import Charge

__all__ = [
    "HEADERS",
    "HttpServer",
    "is_private",
    "json_response",
    "malformed",
    "read_body",
    "read_json",
]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
HEADERS: Final = {
    "Server": "sandbox-server",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response: no version numbers, no caching, no content sniffing."""
_KEEPALIVE_S: Final = 75.0
_FLUSH_S: Final = 5.0
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_BODY_BYTES: Final = 4 * 1024 * 1024
_BODY_TIMEOUT_S: Final = 30.0


def is_private(request: web.BaseRequest) -> bool:
    """Return whether no third party can read a request: TLS, a Unix socket or loopback."""
    transport = request.transport
    if transport is None:
        return False
    if transport.get_extra_info("sslcontext") is not None:
        return True
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return True
    peer = transport.get_extra_info("peername")
    try:
        return ip_address(peer[0].partition("%")[0]).is_loopback
    except (AttributeError, IndexError, TypeError, ValueError):
        return False


def json_response(payload: dict[str, Any], status: int = 200) -> web.Response:
    """Return a response whose body is one JSON object."""
    body = to_json(payload) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json", headers=HEADERS)


async def read_body(request: web.BaseRequest, *, max_bytes: int = _MAX_BODY_BYTES) -> bytes:
    """Return the whole body of a request.

    Raises:
        SandboxUsageError: It is larger than ``max_bytes`` or takes longer than 30 s.
        SandboxExecutionError: code ``busy``; other requests use the memory for bodies.

    """
    charge: Charge = request["charge"]
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                charge.grow(len(chunk))
                data += chunk
                if len(data) > max_bytes:
                    raise SandboxUsageError(
                        f"the request body exceeds the limit of {max_bytes} bytes", code="too-large"
                    )
    except TimeoutError as exc:
        raise SandboxUsageError(
            f"the request body took longer than {_BODY_TIMEOUT_S:g} s", code="too-slow"
        ) from exc
    return bytes(data)


async def read_json(request: web.BaseRequest) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty body is an empty object."""
    body = await read_body(request)
    return parse_json(body, max_bytes=_MAX_BODY_BYTES) if body else {}


def malformed() -> SandboxUsageError:
    """Return the error for a request that cannot be parsed; it repeats nothing of the request."""
    return SandboxUsageError(
        "malformed request: its first line or one of its headers cannot be parsed",
        code="malformed",
        hint="a token file with Windows line ends adds a carriage return to a header: remove it "
        "with tr -d '\\r'",
    )


class HttpServer(web.Server):
    """Creates the protocol of every connection, and passes requests to the application."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limiter: ConnectionLimiter,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            self._handle, access_log=None, keepalive_timeout=_KEEPALIVE_S, handler_cancellation=True
        )
        self._application = handle
        self.limiter = limiter
        self.metrics = metrics

    def protocol_for(self, connection: Connection) -> RequestHandler:
        """Return the protocol for one accepted connection."""
        return _Protocol(self, connection, self._loop, self._kwargs)

    def admit(self, request: web.BaseRequest, grant: Grant) -> None:
        """Mark the connection of a request with a valid key as busy.

        Raises:
            SandboxConnectionError: code ``busy``; a connection limit is reached.

        """
        self.limiter.authenticated(_connection(request), grant)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        connection: Connection = handler.connection
        if connection.state == "closed":
            transport.abort()
        else:
            connection.close = lambda: _close(transport, self._loop)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.limiter.connection_closed(handler.connection)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = _connection(request)
        self.limiter.request_received(connection)
        response = await self._application(request)
        if not connection.has_valid_key:
            # A connection without a key is closed after its response, to make room for others.
            response.force_close()
        self.limiter.request_finished(connection)
        return response


def _connection(request: web.BaseRequest) -> Connection:
    protocol: Any = request.protocol
    found: Connection = protocol.connection
    return found


def _close(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
    """Close a connection at once; a response in the write buffer gets a few seconds."""
    if transport.get_write_buffer_size():
        transport.close()
        loop.call_later(_FLUSH_S, transport.abort)
    else:
        transport.abort()


class _Protocol(RequestHandler):
    """One connection. Its responses and logs repeat nothing of a request that cannot be parsed."""

    __slots__ = ("connection", "head_bytes")

    def __init__(
        self,
        server: HttpServer,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        options: dict[str, Any],
    ) -> None:
        super().__init__(server, loop=loop, **options)
        self.connection = connection
        self.head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._request_count or self.head_bytes < 0:
            return
        # No request is complete yet. The library would buffer up to a MiB of headers, which is too
        # much for a connection without a key.
        self.head_bytes += len(data)
        if self.head_bytes > _MAX_HEAD_BYTES and isinstance(self._manager, HttpServer):
            self.head_bytes = -1
            self._manager.metrics.refused["malformed"] += 1
            self._manager.limiter.drop(self.connection)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        del message  # It holds the bytes that could not be parsed.
        if status == 500:
            _LOGGER.error("request failed", extra={"error": type(exc).__name__})
        elif isinstance(self._manager, HttpServer):
            self._manager.metrics.refused["malformed"] += 1
        if request.writer.output_size > 0:
            raise ConnectionError("the response has already begun")
        response = json_response({"error": encode_error(malformed())}, status)
        response.force_close()
        return response

    def log_exception(self, *_: Any, **options: Any) -> None:
        exc = options.get("exc_info")
        _LOGGER.error("connection failed", extra={"error": type(exc).__name__})

    def log_debug(self, *_: Any, **__: Any) -> None:
        """Drop the library's messages about single requests."""
