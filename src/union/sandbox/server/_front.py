"""The HTTP side of a server: there from the start, or loaded when the first caller comes.

The library behind it takes longer to load than all the rest together. A server whose owner has a
line to it begins without.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Final

from union.sandbox.server._connections import (
    BACKLOG,
    Acceptor,
    ConnectionTable,
    connection_limit,
    raise_file_limit,
)
from union.sandbox.server._handshakes import HANDSHAKE_S, HandshakeQueue, sends_client_hello

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from union.sandbox.server._auth import Authority
    from union.sandbox.server._config import Config
    from union.sandbox.server._connections import Connection
    from union.sandbox.server._gate import Gate
    from union.sandbox.server._sessions import Sessions

__all__ = ["Front", "load"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_GOODBYE_S: Final = 5.0
_READ_AUTHORITIES: Final = "set_default_verify_paths"


def load() -> None:
    """Imports what the front needs."""
    with _no_authorities():
        importlib.import_module("aiohttp")
    importlib.import_module("union.sandbox.server._app")
    importlib.import_module("union.sandbox.server._gate")


@contextlib.contextmanager
def _no_authorities() -> Iterator[None]:
    """While the HTTP library is imported: it reads all certificate authorities, twice.

    They are for its client, which a server does not have: one that was made all the same would
    trust nobody. Nothing else in a server's process asks for them.
    """
    setattr(ssl.SSLContext, _READ_AUTHORITIES, lambda _: None)
    try:
        yield
    finally:
        delattr(ssl.SSLContext, _READ_AUTHORITIES)


class Front:
    """Answers requests at the server's sockets, which it owns."""

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
        self._gate: Gate | None = None
        self._acceptors: list[Acceptor] = []
        self._waiting: list[socket.socket] = []
        self._loading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Accepts connections from here on."""
        from union.sandbox.server._app import App
        from union.sandbox.server._gate import Gate

        config, metrics = self._config, self._sessions.metrics
        limit = connection_limit(
            config.max_connections, files=raise_file_limit(), runs=config.max_runs
        )
        table = ConnectionTable(limit, header_timeout_s=config.header_timeout_s, metrics=metrics)
        app = App(config, self._sessions, self._authority)
        app.shut_down = self._shut_down
        self._gate = gate = Gate(app.handle, table, metrics)
        app.admit = gate.admit
        self._acceptors = [self._accept_on(sock, gate, table) for sock in self._sockets]

    def open_when_asked(self) -> None:
        """The same, as soon as somebody connects; until then they wait in the kernel."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
            loop.add_reader(sock, self._asked)
        self._waiting = list(self._sockets)

    def _asked(self) -> None:
        self._stop_waiting()
        self._loading = asyncio.get_running_loop().create_task(self._load())
        self._loading.add_done_callback(_log_fault)

    async def _load(self) -> None:
        try:
            # Beside the loop: commands go on meanwhile.
            await asyncio.to_thread(load)
            await self.open()
        except BaseException:
            # Whoever waits in the kernel is told.
            for sock in self._sockets:
                sock.close()
            raise

    def _stop_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._waiting:
            loop.remove_reader(sock)
        self._waiting = []

    def _accept_on(self, sock: socket.socket, gate: Gate, table: ConnectionTable) -> Acceptor:
        loop = asyncio.get_running_loop()
        tls = None if sock.family == socket.AF_UNIX else self._context
        handshakes = HandshakeQueue(table)

        async def serve(accepted: socket.socket, connection: Connection) -> None:
            if tls is None:
                protocol = gate.protocol_for(connection)
                await loop.connect_accepted_socket(lambda: protocol, accepted)
                return
            if not await sends_client_hello(accepted):
                raise ConnectionAbortedError("the connection does not begin with a TLS handshake")
            await handshakes.enter(connection)
            try:
                protocol = gate.protocol_for(connection)
                await loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
                )
            except BaseException:
                handshakes.failed()
                raise
            finally:
                handshakes.leave(connection)

        acceptor = Acceptor(sock, table, serve)
        acceptor.start()
        return acceptor

    async def close(self) -> None:
        """No new connections."""
        self._stop_waiting()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in self._sockets:
            sock.close()

    async def shutdown(self) -> None:
        """Ends those that there are."""
        if self._gate is not None:
            self._gate.pre_shutdown()
            await self._gate.shutdown(_GOODBYE_S)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOGGER.error("the server cannot answer requests", exc_info=fault)
