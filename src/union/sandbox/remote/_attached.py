"""AttachedTransport: joins a session that is there already, and shares it with others."""

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
from union.sandbox.remote._transport import RemoteTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox.remote._access import Access
    from union.sandbox.remote._http import Http
    from union.sandbox.remote._link import Link

__all__ = ["AttachedTransport"]

_CLOSE_S: Final = 2.0
_PING_EVERY_S: Final = 7.5
_GONE: Final = (
    "the session has ended: its owner has closed it, its timeout has passed, or its server was "
    "stopped"
)
_OUTSIDE: Final = (
    f"{_GONE}. If it has not: the address of a pod can be reached from the pods of its cluster, so "
    "open the session in a task that runs there, and look whether a NetworkPolicy is in the way"
)


class AttachedTransport(RemoteTransport):
    """One client of a shared session.

    Where the server is may not be known yet: ``reach`` is asked at the first call. With
    ``ends_session`` its end is the session's; otherwise only what was started here ends.
    """

    def __init__(
        self,
        spec: SessionSpec,
        reach: Callable[[], Awaitable[Access]],
        *,
        session: str,
        ends_session: bool,
    ) -> None:
        super().__init__(spec, None)
        self._reach = reach
        self._name = session
        self._ends_session = ends_session

    async def open(self) -> None:
        """Nothing yet: the first call reaches the server."""

    async def _connect(self) -> None:
        if self._access is None:
            self._access = await self._reach()
        line = self._access.line
        if line is not None:
            self._access = dataclasses.replace(self._access, line=None)
            if await self._join_by(line):
                return
        try:
            await super()._connect()
        except BaseException as exc:
            # A reference need not be closed: what is left of a failed attempt goes now.
            http, self._http = self._http, None
            if http is not None:
                await http.close()
            if isinstance(exc, SandboxConnectionError) and exc.code == "connection":
                exc.hint = _GONE if exc.sent or self._access.endpoint.socket else _OUTSIDE
            raise

    def _is_gone(self, exc: SandboxConnectionError) -> bool:
        """A server of this machine is gone with its directory, or when its socket refuses."""
        path = self._way.endpoint.socket
        if path is None or exc.sent:
            return False
        cause = getattr(exc.__cause__, "os_error", exc.__cause__)
        return isinstance(cause, ConnectionRefusedError) or not os.path.isdir(os.path.dirname(path))

    async def _join_by(self, sock: socket.socket) -> bool:
        """Joins over the line. Whatever is against it, a request finds out and says better."""
        line = await SocketStream.from_socket(sock, ping_every_s=_PING_EVERY_S)
        hello = {"protocol": VERSION, "session": self._name, "token": self._way.token}
        try:
            async with asyncio.timeout(self._way.connect_timeout_s):
                await line.send((to_json(hello),))
                told = parse_json(await anext(line, b""))
            if "error" not in told:
                self._carry(line, self._checked_info(told))
        except (WireError, TimeoutError, SandboxConnectionError):
            pass
        finally:
            if self._link is None:
                await line.close()
        return self._link is not None

    async def _requests(self) -> Http:
        path = self._way.endpoint.socket
        if self._http is None and path is not None and "aiohttp" not in sys.modules:
            # The server may have to load what answers requests, too: both at the same time.
            with contextlib.suppress(OSError):
                _, knock = await asyncio.open_unix_connection(path)
                knock.close()
        return await super()._requests()

    async def _join(self, http: Http) -> dict[str, Any]:
        return await http.call("GET", self._path())

    async def aclose(self) -> None:
        link: Link | None = self._link
        try:
            if link is not None and self._ends_session:
                await link.close(within_s=_CLOSE_S)
            elif link is not None:
                await link.end_runs(within_s=_CLOSE_S)
                await link.leave()
        finally:
            await self._let_go()
