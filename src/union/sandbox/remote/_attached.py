"""AttachedTransport: joins a session that is there already, and shares it with others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.wire import VERSION, WireError, parse_json, to_json
from union.sandbox._core.wire_values import facts_from
from union.sandbox._session.line import Line
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
_ASKS_EVERY_S: Final = 7.5
_OUTSIDE: Final = (
    "the address of a pod can be reached from the pods of its cluster: open the session in a task "
    "that runs there; and look whether a NetworkPolicy is in the way"
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
        except SandboxConnectionError as exc:
            if not exc.sent and self._access.endpoint.socket is None and exc.code == "connection":
                exc.hint = _OUTSIDE
            raise

    async def _join_by(self, sock: socket.socket) -> bool:
        """Joins over the line. Whatever is against it, a request finds out and says better."""
        line = await Line.over(sock, asks_every_s=_ASKS_EVERY_S)
        hello = {"protocol": VERSION, "session": self._name, "token": self._way.token}
        try:
            async with asyncio.timeout(self._way.connect_timeout_s):
                await line.send((to_json(hello),))
                told = parse_json(await anext(line, b""))
            if "error" not in told:
                self._carry(line, facts_from(told))
        except (WireError, TimeoutError):
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
