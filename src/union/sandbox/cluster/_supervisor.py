"""Runs one server from its start to its end.

In a pod the task's body does this; where there is no cluster, the owner's process. The server ends
by itself at its expiry. The supervisor enforces that: SIGTERM at the expiry or when the session is
closed, SIGKILL ten seconds later. The server also ends when this process does, which it notices at
the end of its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.errors import decode_error
from union.sandbox.cluster._server_command import clean_environment
from union.sandbox.errors import SandboxError, SandboxExecutionError, SessionClosedError

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from union.sandbox.cluster._server_command import ServerCommand

__all__ = ["Supervisor"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_LATE_S: Final = 0.5
"""The server notifies its clients when it ends at its expiry, so SIGTERM follows a moment later."""
_KILL_AFTER_S: Final = 10.0
_TAIL: Final = 8 * 1024
_MAX_LINE: Final = 1024 * 1024


class Supervisor:
    """The supervisor of one server process. ``run()`` returns when the process has ended."""

    def __init__(self, command: ServerCommand, *, keeps_log: bool) -> None:
        self._command = command
        self._keeps_log = keeps_log
        """Whether the server's log is kept for error messages, or goes to our own stderr."""
        loop = asyncio.get_running_loop()
        self._tail = b""
        self._stop = asyncio.Event()
        self.pid: int | None = None
        self.begun = asyncio.Event()
        """Set when the process has been started, or could not be."""
        self.ready: asyncio.Future[str] = loop.create_future()
        """The endpoint, or the error that explains why there is none."""
        # The result may never be awaited, which must not be logged as an error.
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())

    def stop(self) -> None:
        """End the server, because the session is closed."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    async def run(self) -> str:
        """Run the server; return why it ended: ``closed``, ``stopped``, ``timeout``, ``failed``."""
        command = self._command
        try:
            process = await asyncio.create_subprocess_exec(
                *command.arguments(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE if self._keeps_log else None,
                env=clean_environment(),
                cwd="/",
                limit=_MAX_LINE,
                pass_fds=command.pass_fds,
                # A Ctrl-C must reach only the owner, which then ends the server in order.
                start_new_session=True,
            )
        except OSError as exc:
            self._fail(SandboxExecutionError(f"the server could not be started: {exc}"))
            raise
        finally:
            self.begun.set()
        self.pid = process.pid
        watchers = [asyncio.ensure_future(self._read_status(process))]
        if process.stderr is not None:
            watchers.append(asyncio.ensure_future(self._drain(process.stderr)))
        try:
            return await self._wait_for_end(process)
        finally:
            await self._end(process)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            self._fail(self._early_end(process))

    async def _wait_for_end(self, process: Process) -> str:
        if process.stdin is not None:
            process.stdin.write(self._command.make_launch_spec().encode())
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                {ended, stopped},
                timeout=max(0.0, self._command.expires - time.time()) + _LATE_S,
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
            _LOGGER.warning("the server did not end after SIGTERM within %g s", _KILL_AFTER_S)
        finally:
            # This also runs when cancelled; there is no time then for an orderly end.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if process.stdin is not None:
                process.stdin.close()

    # Output of the server.

    async def _read_status(self, process: Process) -> None:
        if process.stdout is None:
            return
        payload = _parse_line(await process.stdout.readline())
        endpoints = payload.get("ready")
        if isinstance(endpoints, list) and endpoints and not self.ready.done():
            self.ready.set_result(str(endpoints[0]))
        elif isinstance(failed := payload.get("failed"), dict):
            self._fail(decode_error(failed))
        while await process.stdout.read(65536):
            pass  # Nothing more is expected, but a full pipe must not block the server.

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            self._tail = (self._tail + data)[-_TAIL:]

    def _fail(self, error: SandboxError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def _early_end(self, process: Process) -> SandboxError:
        """Return the error of a server that ended before it was ready."""
        if self.is_stopped:
            return SessionClosedError("the session was closed before it was ready")
        if time.time() >= self._command.expires:
            return SessionClosedError("the session's timeout has passed before it was ready")
        stderr_text = self._tail.decode("utf-8", "replace").strip()
        return SandboxExecutionError(
            f"the server ended with {process.returncode} before it was ready"
            + (f": {stderr_text}" if stderr_text else ""),
            code="server",
        )


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(line)
    except ValueError:
        return {}
    return payload if isinstance(payload, dict) else {}
