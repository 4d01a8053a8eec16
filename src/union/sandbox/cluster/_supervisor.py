"""Runs one server from its start to its end.

In a pod the task's body does this; where there is no cluster, the owner's process. The server is
told when to end by itself. This sees to it that it does: SIGTERM when the time is over or the
session is not wanted any more, SIGKILL ten seconds later. The server, for its part, ends when this
process does: it holds the other end of its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.errors import decode_error
from union.sandbox.cluster._launch_spec import clean_environment
from union.sandbox.errors import SandboxError, SandboxExecutionError, SessionClosedError

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from union.sandbox.cluster._launch_spec import Orders

__all__ = ["Supervisor"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_LATE_S: Final = 0.5
"""The server ends a session at its time, and says so to its clients; this comes a moment later."""
_KILL_AFTER_S: Final = 10.0
_TAIL: Final = 8 * 1024
_MOST_LINE: Final = 1024 * 1024


class Supervisor:
    """One server. ``run()`` returns when it is gone."""

    def __init__(self, orders: Orders, *, keeps_log: bool) -> None:
        self._orders = orders
        self._keeps_log = keeps_log
        """Whether what the server logs is kept for error messages, or goes where ours goes."""
        loop = asyncio.get_running_loop()
        self._tail = b""
        self._stop = asyncio.Event()
        self.pid: int | None = None
        self.begun = asyncio.Event()
        """Its process has been started, or could not be."""
        self.ready: asyncio.Future[str] = loop.create_future()
        """Its endpoint, or why there is none."""
        # Nobody may be interested, which is no reason to complain.
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())

    def stop(self) -> None:
        """The session is not wanted any more."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    async def run(self) -> str:
        """Returns why it ended: ``closed``, ``stopped``, ``timeout`` or ``failed``."""
        orders = self._orders
        try:
            process = await asyncio.create_subprocess_exec(
                *orders.arguments(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE if self._keeps_log else None,
                env=clean_environment(),
                cwd="/",
                limit=_MOST_LINE,
                pass_fds=() if orders.line_fd is None else (orders.line_fd,),
                # A Ctrl-C is for the owner, who then ends the server in the right order.
                start_new_session=True,
            )
        except OSError as exc:
            self._fail(SandboxExecutionError(f"the server could not be started: {exc}"))
            raise
        finally:
            self.begun.set()
        self.pid = process.pid
        watchers = [asyncio.ensure_future(self._hear(process))]
        if process.stderr is not None:
            watchers.append(asyncio.ensure_future(self._drain(process.stderr)))
        try:
            return await self._until_over(process)
        finally:
            await self._end(process)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            self._fail(self._early(process))

    async def _until_over(self, process: Process) -> str:
        if process.stdin is not None:
            process.stdin.write(self._orders.line())
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                {ended, stopped},
                timeout=max(0.0, self._orders.expires - time.time()) + _LATE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                return "closed" if ended.result() == 0 else "failed"
            return "stopped" if stopped.done() else "timeout"
        finally:
            for waiter in (ended, stopped):
                waiter.cancel()

    async def _end(self, process: Process) -> None:
        try:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                async with asyncio.timeout(_KILL_AFTER_S):
                    await process.wait()
        except TimeoutError:
            _LOGGER.warning("the server took no notice of SIGTERM")
        finally:
            # Also if this was cancelled: then there is no time to wait for an orderly end.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if process.stdin is not None:
                process.stdin.close()

    # What it says.

    async def _hear(self, process: Process) -> None:
        if process.stdout is None:
            return
        told = _told(await process.stdout.readline())
        endpoints = told.get("ready")
        if isinstance(endpoints, list) and endpoints and not self.ready.done():
            self.ready.set_result(str(endpoints[0]))
        elif isinstance(failed := told.get("failed"), dict):
            self._fail(decode_error(failed))
        while await process.stdout.read(65536):
            pass  # it says nothing more, but must not be held up if it did

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            self._tail = (self._tail + data)[-_TAIL:]

    def _fail(self, error: SandboxError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def _early(self, process: Process) -> SandboxError:
        """Why a server ended before it was ready, if it did."""
        if self.is_stopped:
            return SessionClosedError("the session was closed before it was ready")
        if time.time() >= self._orders.expires:
            return SessionClosedError("the session's timeout has passed before it was ready")
        said = self._tail.decode("utf-8", "replace").strip()
        return SandboxExecutionError(
            f"the server ended with {process.returncode} before it was ready"
            + (f": {said}" if said else ""),
            code="server",
        )


def _told(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
