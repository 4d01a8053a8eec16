"""The handle of one command: SandboxProcess, and the ExecResult that one-shot calls return."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from union.sandbox._core.events import Event, Exited, Failed, Started, Usage
from union.sandbox._core.resolve import settled_output_cap, settled_window
from union.sandbox._session import threads
from union.sandbox._session.streams import Collector, StreamBuffer
from union.sandbox.constants import MAX_LINE_BYTES
from union.sandbox.errors import SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import TerminationReason
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._session.transport import Run

__all__ = ["ExecResult", "ProcessStdin", "SandboxProcess"]

_NAMES: Final = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended and what it wrote."""

    returncode: int
    stdout: str
    stderr: str
    termination_reason: TerminationReason = ""
    runtime_ms: float = 0.0
    truncated: bool = False
    """Output was cut at ``max_output_bytes``."""
    usage: Usage = field(default_factory=Usage)
    backend: str = ""

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.returncode == 0

    @property
    def exit_code(self) -> int:
        """The same as ``returncode``."""
        return self.returncode


class ProcessStdin:
    """The writing end of a command's stdin."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._closed = False

    def _attach(self, run: Run) -> None:
        self._run = run

    def write(self, data: bytes) -> None:
        """Queues ``data`` and begins to send it; ``drain()`` waits until it was taken."""
        if self._closed or self._run is None:
            raise SandboxUsageError("stdin is closed", argument="data")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SandboxUsageError(
                f"stdin takes bytes, not {type(data).__name__}", argument="data"
            )
        self._run.feed_stdin(bytes(data))

    async def drain(self) -> None:
        """Waits until the command's pipe took what was written.

        Raises ``BrokenPipeError`` when the command has closed its stdin or ended.
        """
        if self._run is not None:
            await self._run.drain_stdin()

    def close(self) -> None:
        """End of file for the command, after what was written."""
        self._closed = True
        if self._run is not None:
            self._run.close_stdin()


class SandboxProcess:
    """One command in a sandbox. Made by ``Session.run()``; a non-zero exit never raises."""

    backend: str = ""
    """What isolates the command."""
    isolation: Isolation
    """What is enforced for it."""

    def __init__(
        self, spec: RunSpec, on_done: Callable[[SandboxProcess], object] = lambda _: None
    ) -> None:
        self._spec = spec
        self._on_done = on_done
        self._run: Run | None = None
        self._begun = time.perf_counter()
        self._runtime_ms: float | None = None
        self._failed: Failed | None = None
        self._exited: Exited | None = None
        self._pid: int | None = None
        self._loop = asyncio.get_running_loop()
        self._is_done = False
        self._done_waiters: list[asyncio.Future[None]] = []
        self._exit_waiters: list[asyncio.Future[None]] = []
        self._open_streams = 0
        self._modes = {1: spec.stdout, 2: spec.stderr}
        self._buffers: dict[int, StreamBuffer] = {}
        self._collected: dict[int, Collector] = {}
        self._reading: set[int] = set()
        self._pumps: list[asyncio.Task[None]] = []
        self._decisions: list[Decision] = []
        self.stdin: ProcessStdin | None = ProcessStdin() if spec.stdin == "pipe" else None
        for fd, mode in self._modes.items():
            if mode == "collect":
                self._collected[fd] = Collector(spec.max_output_bytes)
            elif mode in {"pipe", "inherit"}:
                self._buffers[fd] = StreamBuffer(lambda fd=fd: self._resume(fd))  # type: ignore[misc]  # bound per fd
            if mode != "devnull":
                self._open_streams += 1
            if mode == "inherit":
                self._pumps.append(asyncio.create_task(self._forward(fd)))

    # What a transport tells us (the Sink protocol).

    def event(self, event: Event) -> None:
        """For transports: the command has started, ended, or failed to do either."""
        match event:
            case Started():
                self._pid = event.pid
            case Exited():
                self._exited = event
                self._end()
            case Failed():
                self._failed = event
                self._end()
                for fd in (1, 2):
                    self.end_of_output(fd)

    def decision(self, decision: Decision) -> None:
        """For transports: the network was asked for, and this was decided."""
        self._decisions.append(decision)

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        """For transports: bytes of one stream; False asks to hold back until told to resume."""
        # A piped stream goes through its buffer also while it is collected: earlier bytes may
        # still be there.
        buffer = self._buffers.get(fd)
        if buffer is not None:
            return buffer.feed(data)
        self._collected[fd].add(data)
        return True

    def end_of_output(self, fd: int) -> None:
        """For transports: nothing more comes on this stream."""
        buffer = self._buffers.get(fd)
        if buffer is not None:
            buffer.feed_eof()
        self._open_streams -= 1
        self._settle()

    def _attach(self, run: Run) -> None:
        self._run = run
        self.isolation = run.isolation
        self.backend = run.isolation.backend
        if self.stdin is not None:
            self.stdin._attach(run)  # noqa: SLF001 - two halves of one handle

    def _expire(self) -> None:
        if self._run is not None:
            self._run.end("timeout")

    def _end(self) -> None:
        self._runtime_ms = (time.perf_counter() - self._begun) * 1000
        _wake(self._exit_waiters)
        self._settle()

    def _settle(self) -> None:
        ended = self._failed is not None or (self._exited is not None and self._open_streams <= 0)
        if ended and not self._is_done:
            self._is_done = True
            self._on_done(self)
            _wake(self._done_waiters)

    def _resume(self, fd: int) -> None:
        if self._run is not None:
            self._run.resume(fd)

    async def _forward(self, fd: int) -> None:
        """INHERIT: passes what is written to the caller's own stream, as it comes."""
        buffer = self._buffers[fd]
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

    # What the caller sees.

    @property
    def pid(self) -> int | None:
        """The command's process number inside the sandbox."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """None until the command has ended; 128+N when signal N ended it."""
        return None if self._exited is None else self._exited.returncode

    exit_code = returncode

    @property
    def runtime_ms(self) -> float:
        """Wall-clock time, so far or in all."""
        if self._runtime_ms is not None:
            return self._runtime_ms
        return (time.perf_counter() - self._begun) * 1000

    @property
    def termination_reason(self) -> TerminationReason:
        """Empty after an exit; else ``signal``, ``timeout``, ``oom``, ``limit`` or ``closed``.

        ``spawn-failed``, ``plan``, ``stream`` and ``transport`` mean that no real exit happened.
        """
        if self._failed is not None:
            stage = self._failed.stage
            return "spawn-failed" if stage == "spawn" else cast("TerminationReason", stage)
        return "" if self._exited is None else cast("TerminationReason", self._exited.reason)

    @property
    def usage(self) -> Usage:
        """CPU time and memory of the command with all its children, once it has ended."""
        return Usage() if self._exited is None else self._exited.usage

    @property
    def network(self) -> tuple[Decision, ...]:
        """What the command asked of the network, and what was decided, in order."""
        return tuple(self._decisions)

    @property
    def truncated(self) -> tuple[str, ...]:
        """The names of collected streams that were cut at ``max_output_bytes``."""
        return tuple(_NAMES[fd] for fd, c in self._collected.items() if c.truncated)

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the whole process tree; does nothing once it has ended."""
        try:
            number = signals.Signals(signum)
        except ValueError as exc:
            raise SandboxUsageError(
                f"signum must be the number of a signal, not {signum!r}", argument="signum"
            ) from exc
        if not self._ended() and self._run is not None:
            self._run.signal(number)

    def terminate(self) -> None:
        """SIGTERM to the whole process tree."""
        self.send_signal(signals.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process tree."""
        self.send_signal(signals.SIGKILL)

    def resize(self, rows: int, cols: int) -> None:
        """Changes the window of the command's terminal; does nothing once it has ended."""
        if self._spec.pty is None:
            raise SandboxUsageError(
                "resize() needs a command with a terminal", hint="run(..., pty=True)"
            )
        settled_window("rows, cols", rows, cols)
        if not self._ended() and self._run is not None:
            self._run.resize(rows, cols)

    def _ended(self) -> bool:
        return self._exited is not None or self._failed is not None

    async def wait(self) -> int:
        """Waits for the end and returns the exit code.

        Up to 64 MiB of each unread piped stream are kept meanwhile; a command that writes more is
        slowed until somebody reads.
        """
        for fd, buffer in self._buffers.items():
            if fd not in self._reading and self._modes[fd] == "pipe":
                buffer.widen()
        if not self._ended():
            # The end of the command, not of its streams: those may still wait for their reader.
            await self._wait_in(self._exit_waiters)
        await self._finish_pumps()
        return self._checked()

    async def communicate(
        self,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess uses
        *,
        max_output_bytes: int | None = None,
    ) -> tuple[bytes, bytes]:
        """Reads both streams to their end, waits, and returns ``(stdout, stderr)``.

        At most ``max_output_bytes`` of each are kept (64 MiB unless said otherwise); what was cut
        is named in ``truncated``. Cancelling this kills the command.
        """
        try:
            return await self._communicate(input, settled_output_cap(max_output_bytes))
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _communicate(self, data: bytes | None, cap: int) -> tuple[bytes, bytes]:
        if data is not None and self.stdin is None:
            raise SandboxUsageError("input needs run(stdin=PIPE)", argument="input")
        for fd, mode in self._modes.items():
            if mode == "pipe" and fd not in self._collected:
                collector = Collector(cap)
                self._buffers[fd].pour(collector.add)
                self._collected[fd] = collector
        if self.stdin is not None:
            if data:
                self.stdin.write(data)
            self.stdin.close()
        await self._until_done()
        await self._finish_pumps()
        self._checked()
        return self._value(1), self._value(2)

    async def _until_done(self) -> None:
        """Waits until the command has ended and both its streams are read."""
        if not self._is_done:
            await self._wait_in(self._done_waiters)

    async def _wait_in(self, waiters: list[asyncio.Future[None]]) -> None:
        """One future for each who waits: whoever is cancelled takes nothing from the others."""
        waiter = self._loop.create_future()
        waiters.append(waiter)
        try:
            await waiter
        finally:
            waiters.remove(waiter)

    def _value(self, fd: int) -> bytes:
        collector = self._collected.get(fd)
        return b"" if collector is None else collector.value()

    async def communicate_text(
        self,
        input: bytes | None = None,  # noqa: A002 - the name that subprocess uses
        *,
        max_output_bytes: int | None = None,
    ) -> tuple[str, str]:
        """``communicate()``, decoded as UTF-8; what is not UTF-8 is replaced."""
        out, err = await self.communicate(input, max_output_bytes=max_output_bytes)
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def iter_stdout(self) -> AsyncIterator[bytes]:
        """Chunks of stdout as they arrive."""
        return self._iterate(1)

    def iter_stderr(self) -> AsyncIterator[bytes]:
        """Chunks of stderr as they arrive."""
        return self._iterate(2)

    def iter_stdout_lines(self) -> AsyncIterator[str]:
        """Decoded lines of stdout, without their end, as they arrive."""
        return self._iterate_lines(1)

    def iter_stderr_lines(self) -> AsyncIterator[str]:
        """Decoded lines of stderr, without their end, as they arrive."""
        return self._iterate_lines(2)

    async def _iterate(self, fd: int) -> AsyncIterator[bytes]:
        buffer = self._reader(fd)
        try:
            while data := bytes(await buffer.read()):
                yield data
        finally:
            self._reading.discard(fd)
        self._raise_if_failed()

    async def _iterate_lines(self, fd: int) -> AsyncIterator[str]:
        buffer = self._reader(fd)
        try:
            while (line := await buffer.read_line(MAX_LINE_BYTES)) is not None:
                yield line
        finally:
            self._reading.discard(fd)
        self._raise_if_failed()

    def _reader(self, fd: int) -> StreamBuffer:
        """The buffer of a stream about to be read; its sibling may fill meanwhile."""
        if self._modes[fd] == "collect" and self._ended():
            buffer = StreamBuffer(lambda: None)
            if value := self._value(fd):
                buffer.feed(value)
            buffer.feed_eof()
            return buffer
        if self._modes[fd] != "pipe":
            raise SandboxUsageError(
                f"{_NAMES[fd]} was not captured",
                argument=_NAMES[fd],
                hint=f"run(..., {_NAMES[fd]}=True)",
            )
        self._reading.add(fd)
        self._buffers[fd].narrow()
        other = self._buffers.get(3 - fd)
        if other is not None and 3 - fd not in self._reading:
            other.widen()
        return self._buffers[fd]

    async def _finish_pumps(self) -> None:
        for pump in self._pumps:
            await pump

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise SandboxExecutionError(
                self._failed.reason,
                backend=self.backend,
                runtime_ms=self.runtime_ms,
                stage=self._failed.stage,
                code=self._failed.code,
                hint=self._failed.hint,
            )

    def _checked(self) -> int:
        self._raise_if_failed()
        if self._exited is None:
            raise RuntimeError("the end of the command was awaited but not seen")
        return self._exited.returncode

    def result(self) -> ExecResult:
        """What a finished command collected, as one value."""
        return ExecResult(
            returncode=self._checked(),
            stdout=self._value(1).decode("utf-8", "replace"),
            stderr=self._value(2).decode("utf-8", "replace"),
            termination_reason=self.termination_reason,
            runtime_ms=self.runtime_ms,
            truncated=bool(self.truncated),
            usage=self.usage,
            backend=self.backend,
        )

    def __repr__(self) -> str:
        state = "running" if not self._ended() else f"ended {self.returncode}"
        return f"<SandboxProcess {state} backend={self.backend}>"


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
