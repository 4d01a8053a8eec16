"""The socket between a server and the process that started it, used instead of HTTP.

The first message names the session and carries the token. The response is that of
``GET /v1/sessions/ID``, or an error. Then both sides send the frames of the WebSocket protocol.
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
from union.sandbox.server._server_connection import ServerConnection

if TYPE_CHECKING:
    import socket

    from union.sandbox.server._auth import Authority, Grant
    from union.sandbox.server._server_session import ServerSession
    from union.sandbox.server._sessions import Sessions

__all__ = ["OwnerSocket"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_END_TIMEOUT_S: Final = 5.0


class OwnerSocket:
    """Serves the owner's socket until either side closes it."""

    def __init__(self, sock: socket.socket, sessions: Sessions, authority: Authority) -> None:
        self._sessions = sessions
        self._authority = authority
        self._has_client = False
        self._task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._task.add_done_callback(_log_error)

    async def _serve(self, sock: socket.socket) -> None:
        stream = await SocketStream.from_socket(sock)
        sessions = self._sessions
        try:
            message = await anext(stream, None)
            if message is None:
                return
            self._has_client = True
            try:
                grant, session = _authenticate(parse_json(message), sessions, self._authority)
            except SandboxError as exc:
                sessions.metrics.refused[exc.code] += 1
                await stream.send((to_json({"error": encode_error(exc)}),))
                return
            await stream.send((to_json(encode_session_info(session.info())),))
            await ServerConnection(stream, session, sessions, grant=grant, is_private=True).serve()
        except WireError:
            sessions.metrics.bad_frames += 1
        finally:
            await stream.close()

    async def end(self) -> None:
        """Close the socket; wait first until the client has received the end of its session."""
        if self._has_client:
            await asyncio.wait({self._task}, timeout=_END_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait({self._task})


def _authenticate(
    hello: dict[str, Any], sessions: Sessions, authority: Authority
) -> tuple[Grant, ServerSession]:
    if hello.get("protocol") != VERSION:
        raise SandboxConnectionError(
            f"this server accepts protocol version {VERSION}, got {hello.get('protocol')!r:.100}",
            code="version",
        )
    name, token = hello.get("session"), hello.get("token")
    if not isinstance(name, str) or not isinstance(token, str):
        raise WireError("the first message must have a session and a token")
    grant = authority.authenticate(f"Bearer {token}")
    if grant is None:
        raise SandboxConnectionError("invalid token", code="unauthorized")
    if not grant.covers(name):
        raise PolicyError("this token is for another session")
    if sessions.draining:
        raise SandboxConnectionError("the server is shutting down", code="draining")
    return grant, sessions.get(name)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOGGER.error("owner socket failed", exc_info=error)
