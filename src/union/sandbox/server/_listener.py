"""The HTTP listener of a server: open from the start, or from the first connection on.

The HTTP library takes longer to import than the rest of the server. A server whose owner has a
socket to it starts without the library.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from typing import TYPE_CHECKING, Final

from union.sandbox.server._connections import (
    BACKLOG,
    Acceptor,
    ConnectionLimiter,
    connection_limit,
    raise_file_limit,
)
from union.sandbox.server._handshakes import HANDSHAKE_S, HandshakeQueue, sends_client_hello

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from union.sandbox.server._auth import Authority
    from union.sandbox.server._config import Config
    from union.sandbox.server._connections import Connection
    from union.sandbox.server._http import HttpServer
    from union.sandbox.server._sessions import Sessions

__all__ = ["HttpListener", "import_http"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_SHUTDOWN_TIMEOUT_S: Final = 5.0


def import_http() -> None:
    """Import the HTTP library and the modules that use it."""
    importlib.import_module("union.sandbox.server._app")
    importlib.import_module("union.sandbox.server._http")


class HttpListener:
    """Serves HTTP at the server's sockets, which it owns."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        authority: Authority,
        *,
        sockets: list[socket.socket],
        context: ssl.SSLContext | None,
        shut_down: Callable[[], None],
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._authority = authority
        self._sockets = sockets
        self._context = context
        self._shut_down = shut_down
        self._server: HttpServer | None = None
        self._acceptors: list[Acceptor] = []
        self._watched: list[socket.socket] = []
        self._loading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Accept connections from now on."""
        from union.sandbox.server._app import App
        from union.sandbox.server._http import HttpServer

        config, metrics = self._config, self._sessions.metrics
        limit = connection_limit(
            config.max_connections, files=raise_file_limit(), runs=config.max_runs
        )
        limiter = ConnectionLimiter(
            limit, header_timeout_s=config.header_timeout_s, metrics=metrics
        )
        app = App(config, self._sessions, self._authority)
        app.shut_down = self._shut_down
        self._server = server = HttpServer(app.handle, limiter, metrics)
        app.admit = server.admit
        self._acceptors = [self._accept_on(sock, server, limiter) for sock in self._sockets]

    def open_on_demand(self) -> None:
        """Open at the first connection; until then, connections wait in the kernel's backlog."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
            loop.add_reader(sock, self._on_first_connection)
        self._watched = list(self._sockets)

    def _on_first_connection(self) -> None:
        self._stop_watching()
        self._loading = asyncio.get_running_loop().create_task(self._load())
        self._loading.add_done_callback(_log_error)

    async def _load(self) -> None:
        try:
            # The import runs in a thread, so that commands continue meanwhile.
            await asyncio.to_thread(import_http)
            await self.open()
        except BaseException:
            # Closing the sockets resets the connections in the backlog.
            for sock in self._sockets:
                sock.close()
            raise

    def _stop_watching(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._watched:
            loop.remove_reader(sock)
        self._watched = []

    def _accept_on(
        self, sock: socket.socket, server: HttpServer, limiter: ConnectionLimiter
    ) -> Acceptor:
        loop = asyncio.get_running_loop()
        tls = None if sock.family == socket.AF_UNIX else self._context
        handshakes = HandshakeQueue(limiter)

        async def serve(accepted: socket.socket, connection: Connection) -> None:
            if tls is None:
                protocol = server.protocol_for(connection)
                await loop.connect_accepted_socket(lambda: protocol, accepted)
                return
            if not await sends_client_hello(accepted):
                raise ConnectionAbortedError("the connection does not begin with a TLS handshake")
            await handshakes.enter(connection)
            try:
                protocol = server.protocol_for(connection)
                await loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
                )
            except BaseException:
                handshakes.failed()
                raise
            finally:
                handshakes.leave(connection)

        acceptor = Acceptor(sock, limiter, serve)
        acceptor.start()
        return acceptor

    async def close(self) -> None:
        """Accept no further connections; the open ones continue."""
        self._stop_watching()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in self._sockets:
            sock.close()

    async def shut_down_connections(self) -> None:
        """Close the open connections."""
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(_SHUTDOWN_TIMEOUT_S)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOGGER.error("HTTP listener failed to start", exc_info=error)
