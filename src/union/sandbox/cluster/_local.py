"""Where there is no cluster: the same server, as a process of this machine.

Same protocol, same keys, same end; no pod around it. It listens on a socket in a directory that
this user alone can enter, and ends when its owner's process does.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import tempfile
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._session import threads
from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.cluster._keys import Keys, session_name, verifier_of
from union.sandbox.cluster._server_command import WORK_DIR, ServerCommand
from union.sandbox.cluster._server_handle import Found
from union.sandbox.cluster._supervisor import Supervisor
from union.sandbox.errors import SandboxExecutionError, SessionClosedError

if TYPE_CHECKING:
    from union.sandbox._linux.owned_dir import OwnedDir
    from union.sandbox.cluster._request import Request

__all__ = ["LocalHold"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
_LONGEST_PATH: Final = 90
"""The kernel takes 108 bytes for the name of a socket."""
_END_S: Final = 15.0


def _home() -> OwnedDir:
    """A private directory: for the socket, and for the work dir."""
    place = tempfile.gettempdir()
    if os.access(_PREFERRED, os.W_OK | os.X_OK):
        place = _PREFERRED
    elif len(place) > _LONGEST_PATH - 40:
        place = "/tmp"  # noqa: S108 - made private by mkdtemp
    from union.sandbox._linux.owned_dir import OwnedDir

    return OwnedDir.make(place)


class LocalHold:
    """A server that is a process of this machine, and the keys to it.

    Making one starts the server, without waiting for it.
    """

    def __init__(self, request: Request) -> None:
        self.keys = Keys()
        self.verifier = ""  # The owner chose the socket: no announcement has to be verified.
        self._home_dir = _home()
        self._home = self._home_dir.path
        self.endpoint = f"unix://{self._home}/s"
        self._expires = time.time() + request.timeout_s
        ours, theirs = socket.socketpair()
        self._line: socket.socket | None = ours
        self._their_line = theirs
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
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(_log_fault)

    @property
    def pid(self) -> int | None:
        """The server's process, once it has one."""
        return self._supervisor.pid

    async def _run(self) -> str:
        try:
            running = asyncio.ensure_future(self._supervisor.run())
            try:
                # Not sooner: an import would keep the interpreter from starting the process.
                await self._supervisor.begun.wait()
                self._their_line.close()
                # While the server starts: what the first call needs anyway.
                importlib.import_module("union.sandbox.remote._attached")
                return await running
            except BaseException:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise
        finally:
            for end in (self._their_line, self.take_line()):
                if end is not None:
                    end.close()
            # Usually the server has cleaned up; one that was killed could not.
            await threads.removal.run(self, self._home_dir.remove)

    async def found(self) -> Found:
        try:
            async with asyncio.timeout(self._ready_s):
                endpoint = await asyncio.shield(self._supervisor.ready)
        except TimeoutError:
            raise SandboxExecutionError(
                f"the server was not ready after {self._ready_s:g} s",
                stage="transport",
                code="not-ready",
            ) from None
        if time.time() >= self._expires:
            raise SessionClosedError("the session's timeout has passed before it was ready")
        return Found(endpoint=endpoint)

    def take_line(self) -> socket.socket | None:
        """The line to the server, for one taker."""
        line, self._line = self._line, None
        return line

    async def end(self) -> None:
        self._supervisor.stop()
        await asyncio.wait({self._task}, timeout=_END_S)
        self._task.cancel()
        await asyncio.wait({self._task})


def _log_fault(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOGGER.error("a local server could not be run", exc_info=fault)
