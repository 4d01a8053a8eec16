"""Connections before they are requests: how many, and how long they may take to say something."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.web_protocol import RequestHandler

    from union.sandbox.server._config import Config
    from union.sandbox.server._metrics import Metrics

__all__ = ["Gate"]


class Gate(web.Server):
    """Accepts connections; those that say nothing go first when there are too many."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        config: Config,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            self._handle, access_log=None, keepalive_timeout=75.0, handler_cancellation=True
        )
        self._serve = handle
        self._config = config
        self._metrics = metrics
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        """Connections without a request so far, the oldest first."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._metrics.connections += 1
        if self._metrics.connections > self._config.max_connections:
            self._metrics.connections_refused += 1
            if not self._silent:
                transport.abort()
                return
            self._drop(next(iter(self._silent)))
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(
            self._config.header_timeout_s, self._too_slow, handler
        )

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._metrics.connections -= 1
        self._heard(handler)

    def _heard(self, handler: Any) -> None:
        timer = self._silent.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def _too_slow(self, handler: Any) -> None:
        self._metrics.connections_refused += 1
        self._drop(handler)

    def _drop(self, handler: Any) -> None:
        self._heard(handler)
        if handler.transport is not None:
            handler.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._heard(request.protocol)
        return await self._serve(request)
