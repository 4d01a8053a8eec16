"""AttachedTransport: attaches to an existing session, which it shares with other clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.frames import VERSION, WireError, parse_json, to_json
from union.sandbox._wire.message_stream import SocketStream
from union.sandbox.errors import SandboxConnectionError
from union.sandbox.remote._connection import unless_ended
from union.sandbox.remote._transport import RemoteTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox.errors import SandboxError
    from union.sandbox.remote._access import Access
    from union.sandbox.remote._connection import ClientConnection
    from union.sandbox.remote._http import HttpClient

__all__ = ["AttachedTransport"]

_CLOSE_S: Final = 2.0
_PING_EVERY_S: Final = 7.5
_ENDED: Final = (
    "the session has ended: its owner has closed it, its timeout has passed, or its server was "
    "stopped"
)
_UNREACHABLE: Final = (
    f"{_ENDED}. Otherwise: a pod can be reached only from pods of its cluster, so open the session "
    "in a task that runs there, and check for a NetworkPolicy that blocks it"
)


class AttachedTransport(RemoteTransport):
    """One client of a shared session.

    The address of the server may not be available yet: ``locate`` is called at the first use. With
    ``ends_session``, closing ends the session; otherwise it ends only the runs of this client.
    """

    def __init__(
        self,
        spec: SessionSpec,
        locate: Callable[[], Awaitable[Access]],
        *,
        session: str,
        ends_session: bool,
        wait_for_end: Callable[[], Awaitable[SandboxError]] | None = None,
    ) -> None:
        super().__init__(spec, None, session)
        self._wait_for_end = wait_for_end
        # A reference need not be closed.
        self._releases_when_lost = True
        self._locate = locate
        self._ends_session = ends_session

    async def open(self) -> None:
        """Do nothing: the first call connects to the server."""

    async def _connect(self) -> None:
        if self._access is None:
            self._access = await self._locate()
        sock = self._access.owner_socket
        if sock is not None:
            self._access = dataclasses.replace(self._access, owner_socket=None)
            if await self._join_over_socket(sock):
                return
        try:
            await unless_ended(super()._connect(), self._wait_for_end)
        except BaseException as exc:
            # A reference need not be closed, so a failed attempt cleans up at once.
            http, self._http = self._http, None
            if http is not None:
                await http.close()
            if isinstance(exc, SandboxConnectionError) and exc.code == "connection":
                exc.hint = _ENDED if exc.sent or self._access.endpoint.socket else _UNREACHABLE
            raise

    def _is_gone(self, exc: SandboxConnectionError) -> bool:
        """Whether a local server has ended: its socket refuses, or its directory is removed."""
        path = self._required_access.endpoint.socket
        if path is None or exc.sent:
            return False
        cause = getattr(exc.__cause__, "os_error", exc.__cause__)
        return isinstance(cause, ConnectionRefusedError) or not os.path.isdir(os.path.dirname(path))

    async def _join_over_socket(self, sock: socket.socket) -> bool:
        """Attach over the owner's socket. On failure, an HTTP request reports the reason."""
        stream = await SocketStream.from_socket(sock, ping_every_s=_PING_EVERY_S)
        access = self._required_access
        request = {"protocol": VERSION, "session": self.name, "token": access.token}
        try:
            async with asyncio.timeout(access.connect_timeout_s):
                await stream.send((to_json(request),))
                payload = parse_json(await anext(stream, b""))
            if "error" not in payload:
                self._use_stream(stream, self._checked_info(payload))
        except (WireError, TimeoutError, SandboxConnectionError):
            pass
        finally:
            if self._connection is None:
                await stream.close()
        return self._connection is not None

    async def _http_client(self) -> HttpClient:
        path = self._required_access.endpoint.socket
        if self._http is None and path is not None and "aiohttp" not in sys.modules:
            # The server imports its HTTP part at the first connection: have both import at once.
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(path)
                writer.close()
        return await super()._http_client()

    async def _join(self, http: HttpClient) -> dict[str, Any]:
        return await http.call("GET", self.path())

    async def aclose(self) -> None:
        connection: ClientConnection | None = self._connection
        try:
            if connection is not None and self._ends_session:
                await connection.close(within_s=_CLOSE_S)
            elif connection is not None:
                await connection.end_runs(within_s=_CLOSE_S)
                await connection.disconnect()
        finally:
            await self._release()
