"""SandboxProcess: the handle of one command."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
import time
from typing import TYPE_CHECKING, Final, cast

from union.sandbox._core.events import Usage
from union.sandbox._core.resolve import validate_output_cap, validate_window
from union.sandbox._session import threads
from union.sandbox._session.own_loop import deliver, in_own_loop, iterate_in
from union.sandbox._session.result import ExecResult
from union.sandbox._session.sink import ProcessSink
from union.sandbox._session.stdin import ProcessStdin
from union.sandbox._session.streams import StreamBuffer
from union.sandbox.constants import MAX_LINE_BYTES
from union.sandbox.errors import SandboxCommandError, SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import TerminationReason
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._session.transport import Run

__all__ = ["SandboxProcess"]

_NAMES: Final = {1: "stdout", 2: "stderr"}


class SandboxProcess:
    """One command in a sandbox, returned by ``Session.run()``. A non-zero exit never raises."""

    backend: str = ""
    """The backend that isolates the command."""
    isolation: Isolation
    """The isolation layers that apply to this command."""

    def __init__(
        self, spec: RunSpec, on_done: Callable[[SandboxProcess], object] = lambda _: None
    ) -> None:
        self._spec = spec
        self._sink = ProcessSink(spec, lambda: on_done(self))
        self._modes = {1: spec.stdout, 2: spec.stderr}
        self._reading: set[int] = set()
        self._own_loop = asyncio.get_running_loop()
        """The event loop of the session, in which calls from elsewhere are made."""
        self._pumps: list[asyncio.Task[None]] = []
        if spec.stdout == "inherit" or spec.stderr == "inherit":
            self._pumps = [
                asyncio.create_task(self._forward(fd))
                for fd, mode in self._modes.items()
                if mode == "inherit"
            ]
        self.stdin: ProcessStdin | None = ProcessStdin() if spec.stdin == "pipe" else None

    # For the session that owns this handle.

    def _attach(self, run: Run) -> None:
        self._sink.attach(run)
        self.isolation = run.isolation
        self.backend = run.isolation.backend
        if self.stdin is not None:
            self.stdin._attach(run)  # noqa: SLF001 - two halves of one handle

    def _expire(self) -> None:
        if (run := self._sink.run) is not None:
            run.end("timeout")

    async def _until_done(self) -> None:
        """Wait until the command has ended and its output has been received and forwarded."""
        await self._sink.until_done()
        if self._pumps:
            await self._finish_pumps()

    async def _finish_pumps(self) -> None:
        for pump in self._pumps:
            await pump

    async def _forward(self, fd: int) -> None:
        """Copy an INHERIT stream to the caller's own stream as it arrives."""
        buffer = self._sink.buffers[fd]
        while data := bytes(await buffer.read()):
            stream = sys.stdout if fd == 1 else sys.stderr
            try:
                target = stream.fileno()
            except (OSError, ValueError, AttributeError):  # replaced by an object without a file
                stream.write(data.decode("utf-8", "replace"))
                stream.flush()
                continue
            stream.flush()
            await threads.outputs.run(self, _write_all, target, data)

    # Public.

    @property
    def pid(self) -> int | None:
        """The process id inside the sandbox; None before the command has started."""
        return self._sink.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, 128+N if signal N ended the command; None while it runs."""
        exited = self._sink.exited
        return None if exited is None else exited.returncode

    exit_code = returncode

    @property
    def runtime_ms(self) -> float:
        """Wall-clock time in milliseconds: so far, or in total once the command has ended."""
        if self._sink.runtime_ms is not None:
            return self._sink.runtime_ms
        return (time.perf_counter() - self._sink.begun) * 1000

    @property
    def termination_reason(self) -> TerminationReason:
        """Empty after an exit; else ``signal``, ``timeout``, ``oom``, ``limit`` or ``closed``.

        ``spawn-failed``, ``plan``, ``stream`` and ``transport`` mean that no real exit happened.
        """
        failed, exited = self._sink.failed, self._sink.exited
        if failed is not None:
            stage = failed.stage
            return "spawn-failed" if stage == "spawn" else cast("TerminationReason", stage)
        return "" if exited is None else cast("TerminationReason", exited.reason)

    @property
    def usage(self) -> Usage:
        """CPU time and memory of the command with all its children; zero while it runs."""
        exited = self._sink.exited
        return Usage() if exited is None else exited.usage

    @property
    def network(self) -> tuple[Decision, ...]:
        """The network policy decisions for this command, in order."""
        return tuple(self._sink.decisions)

    @property
    def requests(self) -> tuple[HttpRequest, ...]:
        """The HTTP requests of this command to hosts of ``Http`` entries, in order."""
        return tuple(self._sink.requests)

    @property
    def truncated(self) -> tuple[str, ...]:
        """The names of the collected streams that were cut at ``max_output_bytes``."""
        return tuple(_NAMES[fd] for fd, c in self._sink.collected.items() if c.truncated)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the whole process tree. Does nothing once the command has ended.

        Args:
            signum: a signal number, such as ``signal.SIGINT``.

        Raises:
            SandboxUsageError: ``signum`` is not the number of a signal.

        """
        try:
            number = signals.Signals(signum)
        except ValueError as exc:
            raise SandboxUsageError(
                f"signum must be a signal number, not {signum!r}", argument="signum"
            ) from exc
        run = self._sink.run
        if not self._sink.has_ended and run is not None:
            deliver(self._own_loop, run.signal, number)

    def terminate(self) -> None:
        """Send SIGTERM to the whole process tree."""
        self.send_signal(signals.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole process tree."""
        self.send_signal(signals.SIGKILL)

    def resize(self, rows: int, cols: int) -> None:
        """Change the window size of the command's terminal. Does nothing once it has ended.

        Args:
            rows: lines of text, from 1 to 65535.
            cols: characters per line, from 1 to 65535.

        Raises:
            SandboxUsageError: the command has no terminal, or a size is out of range.

        """
        if self._spec.pty is None:
            raise SandboxUsageError(
                "resize() needs a command with a terminal", hint="run(..., pty=True)"
            )
        validate_window("rows, cols", rows, cols)
        run = self._sink.run
        if not self._sink.has_ended and run is not None:
            deliver(self._own_loop, run.resize, rows, cols)

    @in_own_loop
    async def wait(self) -> int:
        """Wait for the command to end and return its exit code.

        Meanwhile up to 64 MiB of each unread piped stream are kept. A command that writes more
        is paused until the stream is read.

        Raises:
            SandboxExecutionError: no real exit happened.

        """
        for fd, buffer in self._sink.buffers.items():
            if fd not in self._reading and self._modes[fd] == "pipe":
                buffer.widen()
        await self._sink.until_ended()
        await self._finish_pumps()
        return self._checked_returncode()

    @in_own_loop
    async def communicate(
        self,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess uses
        *,
        max_output_bytes: int | None = None,
    ) -> tuple[bytes, bytes]:
        """Read both streams to their end, wait for the command, and return ``(stdout, stderr)``.

        Cancelling this call kills the command. A stream that was not captured returns empty.

        Args:
            input: bytes to write to stdin before closing it; needs ``run(stdin=PIPE)``.
                None (default) writes nothing.
            max_output_bytes: bytes of each stream to keep; None (default) for 64 MiB.
                ``truncated`` names the streams that were cut.

        Raises:
            SandboxExecutionError: no real exit happened.

        """
        try:
            return await self._communicate(input, validate_output_cap(max_output_bytes))
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _communicate(self, data: bytes | None, cap: int) -> tuple[bytes, bytes]:
        sink = self._sink
        if data is not None and self.stdin is None:
            raise SandboxUsageError("input needs run(stdin=PIPE)", argument="input")
        for fd, mode in self._modes.items():
            if mode == "pipe" and fd not in sink.collected:
                sink.collect(fd, cap)
        if self.stdin is not None:
            if data:
                self.stdin.write(data)
            self.stdin.close()
        await self._until_done()
        self._checked_returncode()
        return sink.value(1), sink.value(2)

    async def communicate_text(
        self,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess uses
        *,
        max_output_bytes: int | None = None,
    ) -> tuple[str, str]:
        """Like ``communicate()``, decoded as UTF-8; invalid bytes are replaced.

        Args:
            input: as for ``communicate()``.
            max_output_bytes: as for ``communicate()``.

        """
        out, err = await self.communicate(input, max_output_bytes=max_output_bytes)
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def iter_stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks of stdout as they arrive."""
        return iterate_in(self._own_loop, self._iterate(1))

    def iter_stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks of stderr as they arrive."""
        return iterate_in(self._own_loop, self._iterate(2))

    def iter_stdout_lines(self) -> AsyncIterator[str]:
        """Yield decoded lines of stdout, without their line ends, as they arrive.

        A line longer than 1 MiB is yielded in pieces.
        """
        return iterate_in(self._own_loop, self._iterate_lines(1))

    def iter_stderr_lines(self) -> AsyncIterator[str]:
        """Yield decoded lines of stderr, without their line ends, as they arrive.

        A line longer than 1 MiB is yielded in pieces.
        """
        return iterate_in(self._own_loop, self._iterate_lines(2))

    async def _iterate(self, fd: int) -> AsyncGenerator[bytes, None]:
        buffer = self._reader(fd)
        try:
            while data := bytes(await buffer.read()):
                yield data
        finally:
            self._reading.discard(fd)
        self._raise_if_failed()

    async def _iterate_lines(self, fd: int) -> AsyncGenerator[str, None]:
        buffer = self._reader(fd)
        try:
            while (line := await buffer.read_line(MAX_LINE_BYTES)) is not None:
                yield line
        finally:
            self._reading.discard(fd)
        self._raise_if_failed()

    def _reader(self, fd: int) -> StreamBuffer:
        """Return the buffer of a stream about to be read; the other stream may fill meanwhile."""
        sink = self._sink
        if self._modes[fd] == "collect" and sink.has_ended:
            buffer = StreamBuffer(lambda: None)
            if value := sink.value(fd):
                buffer.feed(value)
            buffer.feed_eof()
            return buffer
        if fd == 2 and self._spec.merged:
            raise SandboxUsageError(
                "stderr was merged into stdout", argument="stderr", hint="read stdout"
            )
        if self._modes[fd] != "pipe":
            raise SandboxUsageError(
                f"{_NAMES[fd]} was not captured",
                argument=_NAMES[fd],
                hint=f"run(..., {_NAMES[fd]}=True)",
            )
        self._reading.add(fd)
        sink.buffers[fd].narrow()
        other = sink.buffers.get(3 - fd)
        if other is not None and 3 - fd not in self._reading:
            other.widen()
        return sink.buffers[fd]

    def _raise_if_failed(self) -> None:
        failed = self._sink.failed
        if failed is not None:
            raise SandboxExecutionError(
                failed.reason,
                backend=self.backend,
                runtime_ms=self.runtime_ms,
                stage=failed.stage,
                code=failed.code,
                hint=failed.hint,
            )

    def _checked_returncode(self) -> int:
        self._raise_if_failed()
        if self._sink.exited is None:
            raise RuntimeError("the command has no exit code: it has not ended")
        return self._sink.exited.returncode

    def result(self) -> ExecResult:
        """Return the exit code and the collected output of a command that has ended.

        Raises:
            SandboxExecutionError: no real exit happened.

        """
        return ExecResult(
            returncode=self._checked_returncode(),
            stdout=self._sink.value(1).decode("utf-8", "replace"),
            stderr=self._sink.value(2).decode("utf-8", "replace"),
            termination_reason=self.termination_reason,
            runtime_ms=self.runtime_ms,
            truncated=bool(self.truncated),
            usage=self.usage,
            backend=self.backend,
            network=self.network,
            requests=self.requests,
        )

    def _command_error(self, cmd: str | Sequence[str], result: ExecResult) -> SandboxCommandError:
        from union.sandbox._policy.hints import network_hint

        hint = network_hint(self._spec.network.mode, result)
        return SandboxCommandError(cmd, result, hint=hint)

    def __repr__(self) -> str:
        state = f"ended {self.returncode}" if self._sink.has_ended else "running"
        return f"<SandboxProcess {state} backend={self.backend}>"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
