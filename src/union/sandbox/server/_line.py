"""The line to whoever started this server: its own way in, with the same questions at the door.

The first message says which session and with which token; the answer is what ``GET /sessions/ID``
says, or why not. Then come the frames of the WebSocket, to the same link.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import VERSION, WireError, parse_json, to_json
from union.sandbox._wire.message_stream import SocketStream
from union.sandbox._wire.values import encode_session_info
from union.sandbox.errors import PolicyError, SandboxConnectionError, SandboxError
from union.sandbox.server._link import Link

if TYPE_CHECKING:
    import socket

    from union.sandbox.server._auth import Authority, Grant
    from union.sandbox.server._sessions import ServerSession, Sessions

__all__ = ["OwnerLine"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_GOODBYE_S: Final = 5.0


class OwnerLine:
    """Serves the line until either side ends it."""

    def __init__(self, sock: socket.socket, sessions: Sessions, authority: Authority) -> None:
        self._sessions = sessions
        self._authority = authority
        self._greeted = False
        self._task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._task.add_done_callback(_log_fault)

    async def _serve(self, sock: socket.socket) -> None:
        line = await SocketStream.from_socket(sock)
        sessions = self._sessions
        try:
            hello = await anext(line, None)
            if hello is None:
                return
            self._greeted = True
            try:
                grant, session = _admit(parse_json(hello), sessions, self._authority)
            except SandboxError as exc:
                sessions.metrics.refused[exc.code] += 1
                await line.send((to_json({"error": encode_error(exc)}),))
                return
            await line.send((to_json(encode_session_info(session.facts())),))
            await Link(line, session, sessions, grant=grant).serve()
        except WireError:
            sessions.metrics.bad_frames += 1
        finally:
            await line.close()

    async def end(self) -> None:
        """The sessions have ended: waits until that is said, if anybody listens."""
        if self._greeted:
            await asyncio.wait({self._task}, timeout=_GOODBYE_S)
        self._task.cancel()
        await asyncio.wait({self._task})


def _admit(
    told: dict[str, Any], sessions: Sessions, authority: Authority
) -> tuple[Grant, ServerSession]:
    if told.get("protocol") != VERSION:
        raise SandboxConnectionError(f"this server speaks version {VERSION}", code="version")
    name, token = told.get("session"), told.get("token")
    if not isinstance(name, str) or not isinstance(token, str):
        raise WireError("a line begins with a session and a token")
    grant = authority.judge(f"Bearer {token}")
    if grant is None:
        raise SandboxConnectionError("invalid token", code="unauthorized")
    if not grant.covers(name):
        raise PolicyError("this token is for another session")
    if sessions.draining:
        raise SandboxConnectionError("the server is 'draining'", code="draining")
    return grant, sessions.get(name)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOGGER.error("the line to the owner has failed", exc_info=fault)
