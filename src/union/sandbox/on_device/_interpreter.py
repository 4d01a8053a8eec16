"""One interpreter process: its cells, their network, their output and their ends."""

from __future__ import annotations

import asyncio
import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from union.sandbox._contexts import python_snapshots
from union.sandbox._contexts.frames import (
    MAX_DISPLAYS,
    MAX_RESULT_BYTES,
    Display,
    Done,
    Event,
    Ready,
    Restored,
    saved_pid,
)
from union.sandbox._contexts.specs import MAX_SNAPSHOTS
from union.sandbox._contexts.values import CellEnd, ErrorInfo
from union.sandbox._core.events import Exited, Failed, Usage
from union.sandbox.errors import SandboxExecutionError
from union.sandbox.on_device._network import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._contexts.specs import CellSink, CellSpec
    from union.sandbox._core.events import Event as RunEvent
    from union.sandbox._linux.run import LocalRun
    from union.sandbox._net.egress import Egress
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox.on_device._cell_channels import CellChannel

__all__ = ["Interpreter"]

MAX_BETWEEN_BYTES: Final = 64 * 1024
"""Output of each stream that is kept while no cell runs; beyond that its writer waits."""
_START_TIMEOUT_S: Final = 60.0
_EXIT_REPORT_S: Final = 1.0
"""How long the report of an exit may take after the interpreter closed its socket."""
_REPLACE_S: Final = 20.0
"""How long a restored interpreter may take to replace the present one."""
_Cause = Literal["", "interrupt", "timeout"]


@functools.cache
def _snapshots_source() -> bytes:
    return Path(python_snapshots.__file__).read_bytes()


class _Cell:
    """A cell that runs."""

    def __init__(self, number: int, spec: CellSpec, sink: CellSink) -> None:
        self.number = number
        self.spec = spec
        self.sink = sink
        self.cause: _Cause = ""
        self.timers: list[asyncio.TimerHandle] = []
        self.displays = 0
        self.result_bytes = 0
        self.dropped = 0
        self.exit_code: int | None = None
        self.is_replaced = False
        """Whether a restored interpreter takes over."""
        self.done: Done | None = None
        self.left: dict[int, int] = {}
        """After ``done``: bytes in each pipe that the cell had written."""


class Interpreter:
    """Run cells in one process (the Sink of its run).

    Args:
        grace_s: seconds after which a cell that ignores an interrupt is killed.
        has_network: whether the sandbox has a filtered network.

    """

    def __init__(self, *, grace_s: float, has_network: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._run: LocalRun | None = None
        self._channel: CellChannel | None = None
        self._egress: Egress | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._has_network: asyncio.Future[None] = self._loop.create_future()
        if not has_network:
            self._has_network.set_result(None)
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the process has ended and its last cell was reported."""
        self._end: Exited | Failed | None = None
        self._lost_reason = ""
        self._open_streams = {1, 2}
        self._cell: _Cell | None = None
        self._signals = 0
        """Signals sent since the running, or the last, cell started."""
        self._before = {1: 0, 2: 0}
        """Bytes in each pipe that were written before the running cell started."""
        self._between = {1: bytearray(), 2: bytearray()}
        self._paused: set[int] = set()
        self._snapshots: dict[str, int] = {}
        """The process of each saved interpreter, by the number of the cell that saved it."""
        self.on_between: Callable[[int, bytes], None] = lambda _fd, _data: None
        """Receives what is added to ``between``."""

    # Starting.

    def on_egress(self, egress: Egress) -> None:
        """Take the network of the sandbox; nothing is allowed before a cell starts."""
        self._egress = egress
        egress.suspend()
        if not self._has_network.done():
            self._has_network.set_result(None)

    async def begin(self, run: LocalRun, channel: CellChannel) -> None:
        """Wait until the interpreter can run cells.

        Raises:
            SandboxExecutionError: it ended, or did not start in time.

        """
        self._run, self._channel = run, channel
        channel.on_event = self._on_message
        channel.on_exit_code = self._on_exit_code
        channel.on_lost = self._on_lost
        try:
            if self._end is None:
                channel.start()
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.wait(
                    (asyncio.gather(self._ready, self._has_network), self.gone),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        except TimeoutError:
            self._lost_reason = f"it did not start within {_START_TIMEOUT_S:g} s"
            self.kill("closed")
        except BaseException:
            self.kill("closed")
            raise
        if self.gone.done() or self._lost_reason:
            stderr = bytes(self._between[2]).decode("utf-8", "replace").strip()[-2000:]
            raise SandboxExecutionError(
                f"the interpreter of the context could not be started: {self._why()}"
                + (f"\n{stderr}" if stderr else ""),
                backend=run.isolation.backend,
                stage="spawn",
                code="context-start",
            )
        for stream in self._between.values():
            stream.clear()  # messages about the start belong to no cell

    # State.

    @property
    def is_alive(self) -> bool:
        return self._end is None and not self._lost_reason and self._ready.done()

    @property
    def between(self) -> tuple[bytes, bytes]:
        return bytes(self._between[1]), bytes(self._between[2])

    # Cells.

    def start(self, number: int, spec: CellSpec, sink: CellSink) -> None:
        run, channel = self._run, self._channel
        if run is None or channel is None:
            raise RuntimeError("the interpreter has not started")
        cell = self._cell = _Cell(number, spec, sink)
        if self._end is not None:
            self._finish_lost()
            return
        if spec.operation in {"save", "restore", "discard"}:
            refusal = self._check_snapshot(spec)
            if refusal is not None:
                self._cell = None
                sink.done(CellEnd(error=refusal))
                return
            process = str(self._snapshots.get(spec.name, ""))
            spec = spec._replace(name=process, code=_snapshots_source())
        # What the pipes hold now was written between cells.
        self._before = {1: 0, 2: 0, **run.output.pending()}
        self._resume_streams()
        if self._egress is not None:
            self._egress.switch(rules_of(spec.network))
        if spec.timeout_s is not None:
            cell.timers.append(self._loop.call_later(spec.timeout_s, self._interrupt, "timeout"))
        signals, self._signals = self._signals, 0
        channel.send(number, spec, signals=signals)

    def _check_snapshot(self, spec: CellSpec) -> ErrorInfo | None:
        if spec.operation != "save" and spec.name not in self._snapshots:
            return ErrorInfo(name="LookupError", value=f"there is no snapshot {spec.name}")
        if spec.operation == "save" and len(self._snapshots) >= MAX_SNAPSHOTS:
            value = f"the context has {MAX_SNAPSHOTS} snapshots; discard() one first"
            return ErrorInfo(name="LimitError", value=value)
        return None

    def _on_restored(self, cell: _Cell, event: Restored) -> None:
        """Follow the process that replaces the interpreter; its end is that of the context."""
        if cell.spec.operation != "restore" or cell.is_replaced or self._run is None:
            return
        cell.is_replaced = True
        cell.timers.append(self._loop.call_later(_REPLACE_S, self.kill, "died"))
        self._run.sandbox.follow(event.pid)
        if self._channel is not None:
            self._channel.replace(cell.number)

    def interrupt(self) -> None:
        self._interrupt("interrupt")

    def _interrupt(self, cause: _Cause) -> None:
        cell, run, channel = self._cell, self._run, self._channel
        if cell is None or cell.done is not None or run is None or channel is None:
            return
        if not cell.cause:
            cell.cause = cause
            cell.timers.append(self._loop.call_later(self._grace_s, self.kill, cause))
        self._signals += 1
        channel.interrupt(cell.number)
        run.signal(signal.SIGINT, group=True)
        run.signal(signal.SIGCONT, group=True)  # a stopped process does not see SIGINT

    def resume(self) -> None:
        """Continue after a sink returned False."""
        if self._channel is not None:
            self._channel.resume()
        self._resume_streams()

    def _resume_streams(self) -> None:
        paused, self._paused = self._paused, set()
        for fd in paused:
            if self._run is not None:
                self._run.resume(fd)

    def kill(self, cause: str) -> None:
        """End the process and everything that it started."""
        if self._run is not None:
            self._run.end_now(cause)

    def close(self) -> None:
        """Release the socket of a process that has ended."""
        if self._channel is not None:
            self._channel.close()

    # Messages of the interpreter.

    def _on_message(self, event: Event) -> bool:
        if isinstance(event, Ready):
            if not self._ready.done():
                self._ready.set_result(None)
            return True
        cell = self._cell
        # Sandboxed code can send any message. One that names another cell has no effect.
        if cell is None or cell.done is not None or event.number != cell.number:
            return True
        if isinstance(event, Display):
            return self._on_display(cell, event)
        if isinstance(event, Restored):
            self._on_restored(cell, event)
            return True
        if event.error is None and cell.spec.operation in {"save", "discard"}:
            name = str(cell.number)
            if cell.spec.operation == "save":
                self._snapshots[name] = saved_pid(event.value)
            else:
                self._snapshots.pop(cell.spec.name, None)
        self._on_done(cell, event)
        return True

    def _on_display(self, cell: _Cell, event: Display) -> bool:
        if cell.displays >= MAX_DISPLAYS or cell.result_bytes + event.size > MAX_RESULT_BYTES:
            cell.dropped += 1
            return True
        cell.displays += 1
        cell.result_bytes += event.size
        if self._run is not None:
            self._run.output.read_now()  # printed before it was displayed
        return cell.sink.display(event.bundle)

    def _on_exit_code(self, code: int) -> None:
        if self._cell is not None:
            self._cell.exit_code = code

    def _on_done(self, cell: _Cell, event: Done) -> None:
        cell.done = event
        self._stop_timers(cell)
        if self._egress is not None:
            self._egress.suspend()
        if self._run is None:
            return
        # Everything that the cell has written is in the pipes by now.
        cell.left = {fd: size for fd, size in self._run.output.pending().items() if size}
        for fd, size in self._before.items():
            if size and fd in cell.left:
                cell.left[fd] = max(0, cell.left[fd] - size)
        if any(cell.left.values()):
            self._run.output.read_now()
        self._finish_done()

    def _on_lost(self, reason: str) -> None:
        if reason:
            self._lost_reason = f"it sent a malformed message: {reason}"
            self.kill("died")
        elif self._end is None:
            # Its exit is usually reported at this moment; else it closed the socket and runs on.
            self._loop.call_later(_EXIT_REPORT_S, self._end_detached)

    def _end_detached(self) -> None:
        if self._end is None:
            self._lost_reason = "it closed its connection to the host"
            self.kill("died")

    def _stop_timers(self, cell: _Cell) -> None:
        for timer in cell.timers:
            timer.cancel()
        cell.timers.clear()

    def _finish_done(self) -> None:
        """Report a cell that is done once all of its output was delivered."""
        cell = self._cell
        if cell is None or cell.done is None or any(cell.left.values()):
            return
        done = cell.done
        self._cell = None
        cell.sink.done(
            CellEnd(
                ended=cell.cause,
                reason=_CAUSES.get(cell.cause, ""),
                error=done.error,
                exit_code=cell.exit_code,
                value=done.value,
                usage=done.usage,
                dropped=done.dropped + cell.dropped,
            )
        )

    def _finish_lost(self) -> None:
        cell, end = self._cell, self._end
        self._cell = None
        if cell is None:
            return
        self._stop_timers(cell)
        reason = end.reason if isinstance(end, Exited) else ""
        usage = end.usage if isinstance(end, Exited) else Usage()
        ended: Literal["interrupt", "timeout", "died", "oom", "closed"] = "died"
        if reason in {"oom", "closed"}:
            ended = "oom" if reason == "oom" else "closed"
        elif cell.cause and reason == cell.cause:
            ended = cell.cause
        cell.sink.done(
            CellEnd(
                ended=ended, state="lost", reason=self._why(), usage=usage, dropped=cell.dropped
            )
        )

    def _why(self) -> str:
        """Return why the process has ended."""
        end = self._end
        if self._lost_reason:
            return self._lost_reason
        if isinstance(end, Failed):
            return end.reason
        if end is None:
            return "it has not ended"
        if end.reason == "oom":
            return "the memory limit of the sandbox was reached"
        if end.reason == "limit":
            return "a limit of the sandbox was exceeded"
        if end.reason == "closed":
            return "the context was closed"
        if end.reason in _CAUSES and end.reason:
            return f"{_CAUSES[end.reason]}, and it did not end within {self._grace_s:g} s"
        if end.returncode > 128 and end.reason:
            number = end.returncode - 128
            try:
                name = signal.Signals(number).name
            except ValueError:
                name = "unknown"
            return f"signal {number} ({name}) ended the interpreter"
        return f"the interpreter exited with code {end.returncode}"

    # The Sink of the run.

    def event(self, event: RunEvent) -> None:
        if isinstance(event, Exited | Failed):
            self._end = event
            if self._egress is not None:
                self._egress.close()
            if isinstance(event, Failed):
                self._open_streams.clear()
            self._finish_process()

    def end_of_output(self, fd: int) -> None:
        self._open_streams.discard(fd)
        cell = self._cell
        if cell is not None:
            cell.left.pop(fd, None)
            self._finish_done()
        self._finish_process()

    def _finish_process(self) -> None:
        if self._end is None or self._open_streams or self.gone.done():
            return
        self._finish_lost()
        self.close()
        self.gone.set_result(None)

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        view = memoryview(data)
        before = min(self._before[fd], len(view))
        has_room = True
        if before:
            self._before[fd] -= before
            self._keep_between(fd, view[:before])
            view = view[before:]
        cell = self._cell
        if cell is not None and len(view):
            size = len(view)
            if cell.done is not None:
                size = min(cell.left.get(fd, 0), size)
                cell.left[fd] = cell.left.get(fd, 0) - size
            if size:
                has_room = cell.sink.output(fd, view[:size])
            view = view[size:]
        if len(view):
            has_room = self._keep_between(fd, view) and has_room
        if cell is not None and cell.done is not None:
            self._finish_done()
        if not has_room:
            self._paused.add(fd)
        return has_room

    def _keep_between(self, fd: int, data: memoryview) -> bool:
        kept = self._between[fd]
        more = bytes(data[: max(0, MAX_BETWEEN_BYTES - len(kept))])
        if more:
            kept += more
            self.on_between(fd, more)
        # Nothing reads more before the next cell: the writer waits, and costs the host no time.
        return len(kept) < MAX_BETWEEN_BYTES or self._cell is not None or self._end is not None

    def decision(self, decision: Decision) -> None:
        if self._cell is not None:
            self._cell.sink.decision(decision)

    def request(self, request: HttpRequest) -> None:
        if self._cell is not None:
            self._cell.sink.request(request)


_CAUSES: Final = {
    "": "",
    "interrupt": "the cell was interrupted",
    "timeout": "the timeout of the cell has passed",
}
