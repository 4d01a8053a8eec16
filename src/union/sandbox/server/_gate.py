"""The HTTP protocol of a connection: requests go to the application, malformed ones nowhere.

The HTTP library would answer and log a malformed request with the bytes that it could not read,
which may be the caller's token. Here both say that it was malformed, and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import to_json
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._bodies import HEADERS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from union.sandbox.server._auth import Grant
    from union.sandbox.server._connections import Connection, ConnectionTable
    from union.sandbox.server._metrics import Metrics

__all__ = ["Gate", "malformed"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_KEEPALIVE_S: Final = 75.0
_FLUSH_S: Final = 5.0
_MAX_HEAD: Final = 64 * 1024


def malformed() -> SandboxUsageError:
    """The one error for a request that cannot be read; it repeats nothing of it."""
    return SandboxUsageError(
        "malformed request: its first line or one of its headers cannot be read",
        code="malformed",
        hint="a token file with Windows line ends adds a carriage return to a header: remove it "
        "with tr -d '\\r'",
    )


class Gate(web.Server):
    """Makes the protocol of every connection, and hands their requests on."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        table: ConnectionTable,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            self._handle, access_log=None, keepalive_timeout=_KEEPALIVE_S, handler_cancellation=True
        )
        self._serve = handle
        self.table = table
        self.metrics = metrics

    def protocol_for(self, connection: Connection) -> RequestHandler:
        return _Protocol(self, connection, self._loop, self._kwargs)

    def admit(self, request: web.BaseRequest, grant: Grant) -> None:
        """The request carries a valid key; raises if there is no room for the connection."""
        self.table.prove(_connection(request), grant)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        connection: Connection = handler.connection
        if connection.state == "gone":
            transport.abort()
        else:
            connection.close = lambda: _close(transport, self._loop)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.table.lost(handler.connection)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = _connection(request)
        self.table.asked(connection)
        response = await self._serve(request)
        if not connection.answers_key:
            # A stranger has had its answer: the place is for somebody else.
            response.force_close()
        self.table.rest(connection)
        return response


def _connection(request: web.BaseRequest) -> Connection:
    protocol: Any = request.protocol
    found: Connection = protocol.connection
    return found


def _close(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
    """At once; an answer that is on its way gets a few seconds."""
    if transport.get_write_buffer_size():
        transport.close()
        loop.call_later(_FLUSH_S, transport.abort)
    else:
        transport.abort()


class _Protocol(RequestHandler):
    """One connection. Its answers and logs repeat nothing of a request that cannot be read."""

    __slots__ = ("connection", "head_bytes")

    def __init__(
        self,
        gate: Gate,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        options: dict[str, Any],
    ) -> None:
        super().__init__(gate, loop=loop, **options)
        self.connection = connection
        self.head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._request_count or self.head_bytes < 0:
            return
        # No request is whole yet: the library keeps up to a MiB of headers, which is too much for
        # strangers.
        self.head_bytes += len(data)
        if self.head_bytes > _MAX_HEAD and isinstance(self._manager, Gate):
            self.head_bytes = -1
            self._manager.metrics.refused["malformed"] += 1
            self._manager.table.drop(self.connection)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        del message  # the bytes that could not be read
        if status == 500:
            _LOGGER.error("a request failed", extra={"error": type(exc).__name__})
        elif isinstance(self._manager, Gate):
            self._manager.metrics.refused["malformed"] += 1
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        body = to_json({"error": encode_error(malformed())}) + b"\n"
        response = web.Response(
            body=body,
            status=status,
            content_type="application/json",
            headers=HEADERS,
        )
        response.force_close()
        return response

    def log_exception(self, *_: Any, **options: Any) -> None:
        exc = options.get("exc_info")
        _LOGGER.error("a connection failed", extra={"error": type(exc).__name__})

    def log_debug(self, *_: Any, **__: Any) -> None:
        """The library's notes about single requests are not kept."""
