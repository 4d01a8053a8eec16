"""The server of a session as a process of this machine, where there is no cluster.

The protocol, the tokens and the lifetime are the same, without a pod around it. It listens on a
socket in a directory that only this user can enter, and ends when its owner's process does.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._session import threads
from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.cluster._credentials import read_credentials
from union.sandbox.cluster._keys import Keys, session_name, verifier_of
from union.sandbox.cluster._server_command import WORK_DIR, ServerCommand
from union.sandbox.cluster._server_handle import ServerAddress
from union.sandbox.cluster._supervisor import Supervisor
from union.sandbox.errors import SandboxExecutionError, SessionClosedError

if TYPE_CHECKING:
    from union.sandbox._linux.owned_dir import OwnedDir
    from union.sandbox.cluster._request import Request

__all__ = ["LocalServer", "live"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
_MAX_PATH: Final = 90
"""The kernel accepts 108 bytes for the path of a socket."""
_END_S: Final = 15.0


def _home() -> OwnedDir:
    """Create a private directory for the socket and the work dir."""
    place = tempfile.gettempdir()
    if os.access(_PREFERRED, os.W_OK | os.X_OK):
        place = _PREFERRED
    elif len(place) > _MAX_PATH - 40:
        place = "/tmp"  # noqa: S108 - made private by mkdtemp
    from union.sandbox._linux.owned_dir import OwnedDir

    return OwnedDir.make(place)


class LocalServer:
    """A server that is a process of this machine, and the tokens for it.

    Creating one starts the server, without waiting for it.
    """

    def __init__(self, request: Request) -> None:
        self.keys = Keys()
        self.verifier = ""  # The owner chose the socket, so no announcement is verified.
        stored = read_credentials(request.credentials)
        self._home_dir = _home()
        self._home = self._home_dir.path
        self.endpoint = f"unix://{self._home}/s"
        self._expires = time.time() + request.timeout_s
        ours, theirs = socket.socketpair()
        self._owner_socket: socket.socket | None = ours
        self._server_socket = theirs
        their_fd = theirs.fileno()

        def make_launch_spec() -> LaunchSpec:
            return LaunchSpec(
                session=session_name(request.name),
                session_arguments=request.session(env=request.env_vars),
                owner_sha256=verifier_of(self.keys.owner),
                guest_sha256=verifier_of(self.keys.guest),
                expires=self._expires,
                shown_at=WORK_DIR if request.spec.host_work_dir is None else None,
                home=self._home,
                owner_socket=their_fd,
                secrets=stored or None,
            )

        command = ServerCommand(
            backend=request.backend,
            bind=f"unix:{self._home}/s",
            expires=self._expires,
            make_launch_spec=make_launch_spec,
            work_dir=self._home,
            allow_paths=request.paths,
            log_level="warning",
            pass_fds=(their_fd,),
        )
        self._supervisor = Supervisor(command, keeps_log=True)
        self._ready_s = request.ready_timeout_s
        loop = asyncio.get_running_loop()
        self.loop = loop
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(_log_fault)
        self.fields: dict[str, Any] = {}
        """The fields of its session, for another handle of the same owner."""
        _LIVE[request.name] = self
        self._task.add_done_callback(lambda _: _forget(request.name, self))

    @property
    def pid(self) -> int | None:
        """The process id of the server, once it is started."""
        return self._supervisor.pid

    async def _run(self) -> str:
        try:
            running = asyncio.ensure_future(self._supervisor.run())
            try:
                # Not earlier, because importing would delay the start of the process.
                await self._supervisor.begun.wait()
                self._server_socket.close()
                # The first call needs this import, which overlaps with the server's start.
                importlib.import_module("union.sandbox.remote._attached")
                return await running
            except BaseException:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise
        finally:
            for end in (self._server_socket, self.take_socket()):
                if end is not None:
                    end.close()
            # Usually the server has removed it; a killed one could not.
            await threads.removal.run(self, self._home_dir.remove)

    async def wait_ready(self) -> ServerAddress:
        try:
            async with asyncio.timeout(self._ready_s):
                endpoint = await asyncio.shield(self._supervisor.ready)
        except TimeoutError:
            raise SandboxExecutionError(
                f"the server was not ready after {self._ready_s:g} s",
                stage="transport",
                code="not-ready",
                hint="session(ready_timeout=...) waits longer",
            ) from None
        if time.time() >= self._expires:
            raise SessionClosedError("the session's timeout has passed before it was ready")
        return ServerAddress(endpoint=endpoint)

    def take_socket(self) -> socket.socket | None:
        """Return the socket to the server the first time, then None."""
        sock, self._owner_socket = self._owner_socket, None
        return sock

    async def end(self) -> None:
        self._supervisor.stop()
        await asyncio.wait({self._task}, timeout=_END_S)
        self._task.cancel()
        await asyncio.wait({self._task})


_LIVE: Final[dict[str, LocalServer]] = {}
"""The servers of this process by the names of their sessions."""


def _forget(name: str, server: LocalServer) -> None:
    if _LIVE.get(name) is server:
        del _LIVE[name]


def live(name: str) -> tuple[LocalServer, dict[str, Any]] | None:
    """Return a server that runs in this event loop, and the fields of its session."""
    server = _LIVE.get(name)
    if server is None or server.loop is not asyncio.get_running_loop():
        return None
    return server, server.fields


def _log_fault(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOGGER.error("a local server has failed", exc_info=fault)
