"""Contexts of a session on a server: runs that keep an interpreter, and runs that are its cells."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Literal

from union.sandbox._contexts.wire import ContextChange, encode_change, encode_display, encode_end
from union.sandbox._core.events import Exited, Started, Usage
from union.sandbox._core.spec import RunSpec
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import MESSAGES, WireError, to_json
from union.sandbox._wire.process_values import encode_processes
from union.sandbox._wire.run_log import StreamLog
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError
from union.sandbox.server._cell_records import CellRecord, ContextRecord
from union.sandbox.server._quotas import busy
from union.sandbox.server._runs import ServerRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._contexts.specs import CellSpec, ContextSpec
    from union.sandbox._contexts.values import CellEnd, MimeBundle
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._contexts import LocalContext
    from union.sandbox.on_device._transport import LocalTransport
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._quotas import Buffers

__all__ = ["ServerCell", "ServerContext"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MAX_REQUESTS: Final = 16
"""Requests about one context that are handled at once."""
_PID: Final = 2
"""The process id of the interpreter inside its sandbox."""


class _Handle:
    """The engine's side of a context or a cell (the Run protocol); neither has stdin."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation

    def resume(self, fd: int) -> None:
        """Nothing is paused."""

    def signal(self, signum: int) -> None:
        """Nothing receives signals."""

    def end(self, cause: str) -> None:
        """Subclasses end what they stand for."""

    def resize(self, rows: int, cols: int) -> None:
        """There is no terminal."""

    def feed_stdin(self, data: bytes) -> None:
        """There is no stdin."""

    async def drain_stdin(self) -> None:
        raise BrokenPipeError("a context has no stdin")

    def close_stdin(self) -> None:
        """There is no stdin."""


class ServerContext(ServerRun):
    """A context: its output is what was written between cells, its events are its state.

    Args:
        number: the number that the client chose.
        spec: the context.
        buffers: counts its output.
        grant: the rights of the client that opened it; its cells need the same key.

    """

    def __init__(self, number: int, spec: ContextSpec, buffers: Buffers, grant: Grant) -> None:
        shown = RunSpec(
            kind="python", text=f"{spec.language} context", stdout="pipe", stderr="pipe"
        )
        super().__init__(number, shown, buffers, grant)
        self.spec = spec
        self.record: ContextRecord = ContextRecord(shown, spec.language)
        self.record.end_run = self.end
        self.is_urgent = True
        self.cell: ServerCell | None = None
        """The cell that runs."""
        self.live: LocalContext | None = None
        self._generation = 0
        self._at = (0, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._is_ending = False

    # Start and end.

    async def begin(self, transport: LocalTransport) -> None:
        """Start the interpreter; a refusal becomes the only event."""
        await self.start(_Opener(self, transport))  # type: ignore[arg-type]  # used for start() alone

    async def open(self, transport: LocalTransport) -> _ContextHandle:
        live = self.live = await transport.open_context(self.spec)
        live.on_between = self._on_between
        live.on_lost = self._report
        self.event(Started(_PID))
        return _ContextHandle(live.isolation, self)

    def end_soon(self) -> None:
        """End the interpreter, and with it the context."""
        if not self._is_ending:
            self._is_ending = True
            self._spawn(self._end())

    async def _end(self) -> None:
        live = self.live
        if live is not None:
            async with self._changing:
                await live.aclose()
        for fd in self.log.streams:
            self.end_of_output(fd)
        self.event(Exited(0, "closed", Usage()))

    async def aclose(self) -> None:
        """End the context, and return when it has ended."""
        if self.live is not None:
            self.end_soon()
            await self.over

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task)

    def _on_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.error("a request about a context failed", exc_info=error)

    # State.

    def _on_between(self, fd: int, data: bytes) -> None:
        # Bounded for each interpreter; a client that does not read it gets no more of it.
        if not self._buffers.is_full(self.log.streams[fd]):
            self.output(fd, data)

    def _report(self) -> None:
        self._change()

    def _change(self, **fields: Any) -> None:
        if self.log.ended or self.live is None:
            return
        change = ContextChange(self._generation, self.live.is_alive, self._at, **fields)
        self.log.events.append(to_json(encode_change(change)))
        self._notify()

    # Requests of the client.

    def _control(self, control: dict[str, Any]) -> None:
        match control:
            case {"op": "restart", "request": int(request)} if 0 < request < 2**32:
                self._request(request, self._restart)
            case {"op": "processes", "request": int(request)} if 0 < request < 2**32:
                self._request(request, self._processes)
            case {"op": "end", "cause": ("closed" | "timeout") as cause}:
                self.end(cause)
            case _:
                raise WireError(
                    "unknown control of a context; accepted are restart, processes and end"
                )

    def _request(self, request: int, call: Callable[[LocalContext], Awaitable[Any]]) -> None:
        if len(self._tasks) >= _MAX_REQUESTS:
            raise WireError(f"too many requests about one context (limit {_MAX_REQUESTS})")
        self._spawn(self._reply(request, call))

    async def _reply(self, request: int, call: Callable[[LocalContext], Awaitable[Any]]) -> None:
        live = self.live
        try:
            if live is None:
                raise SandboxUsageError("the context has not started", code="context-busy")
            value = await call(live)
        except SandboxError as exc:
            self._change(reply=request, error=encode_error(exc))
        else:
            self._change(reply=request, value=value)

    async def _processes(self, live: LocalContext) -> dict[str, Any]:
        return encode_processes(await live.processes())

    async def _restart(self, live: LocalContext) -> None:
        async with self._changing:
            if self._is_ending:
                return
            await live.restart()
            self._generation += 1
            out, err = self.log.streams[1], self.log.streams[2]
            self._at = (out.end, err.end)


class _Opener:
    """Starts a context where ``ServerRun.start`` expects a transport."""

    def __init__(self, context: ServerContext, transport: LocalTransport) -> None:
        self._context = context
        self._transport = transport
        self.isolation = transport.isolation

    async def start(self, _spec: RunSpec, _sink: Sink) -> _ContextHandle:
        return await self._context.open(self._transport)


class _ContextHandle(_Handle):
    def __init__(self, isolation: Isolation, context: ServerContext) -> None:
        super().__init__(isolation)
        self._context = context

    def end(self, cause: str) -> None:  # noqa: ARG002 - a context has one way to end
        self._context.end_soon()


class ServerCell(ServerRun):
    """One cell (the CellSink protocol): a run with a third stream, for displays and the end.

    Args:
        number: the number that the client chose.
        context: the context that runs it.
        cell: its number in the context, and its description.
        buffers: counts its output.
        grant: the rights of the client.

    """

    def __init__(
        self,
        number: int,
        context: ServerContext,
        cell: tuple[int, CellSpec],
        buffers: Buffers,
        grant: Grant,
    ) -> None:
        self._index, spec = cell
        mode: Literal["pipe", "collect"] = "pipe" if spec.is_streamed else "collect"
        shown = RunSpec(
            kind="python",
            text=spec.code.decode("utf-8", "replace") if spec.operation == "run" else "",
            stdout=mode,
            stderr=mode,
            network=spec.network,
            timeout_s=spec.timeout_s,
        )
        super().__init__(number, shown, buffers, grant)
        self.log.streams[MESSAGES] = StreamLog()
        self.record: CellRecord = CellRecord(shown, context.record, self._index, spec)
        self.record.end_run = self.end
        self._context = context
        self._cell = spec
        self._room = {1: spec.max_output_bytes + 1, 2: spec.max_output_bytes + 1}
        """Bytes to send of a cell that is not streamed: one more than its caller keeps, so that
        the caller knows that there was more."""

    async def begin(self) -> None:
        """Start the cell in its context; a refusal becomes the only event."""
        await self.start(_Starter(self, self._context))  # type: ignore[arg-type]  # as above

    def launch(self) -> _CellHandle:
        context = self._context
        live = context.live
        if live is None or context.log.ended:
            raise SandboxExecutionError(
                "the context has ended", stage="transport", code="context-lost"
            )
        if context.cell is not None:
            raise busy("the context runs another cell", code="context-busy")
        context.cell = self
        self.event(Started(_PID))
        try:
            live.start(self._index, self._cell, self)
        except BaseException:
            context.cell = None
            raise
        return _CellHandle(live, self)

    # The CellSink protocol; ``decision`` is that of a run.

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        if not self._cell.is_streamed:
            data = data[: self._room[fd]]
            self._room[fd] -= len(data)
            if not data:
                return True
        return super().output(fd, data)

    def display(self, bundle: MimeBundle) -> bool:
        self.record.display(bundle)
        streams = self.log.streams
        return self._message(encode_display(bundle, (streams[1].end, streams[2].end)))

    def _message(self, data: bytes) -> bool:
        stream = self.log.streams[MESSAGES]
        before = stream.held
        stream.append(data)
        self._account(stream.held - before)
        self._notify_soon()
        if self._buffers.is_full(stream):
            self._paused.add(MESSAGES)
            return False
        return True

    def done(self, end: CellEnd) -> None:
        self._context.cell = None
        self.record.cell_ended(end)
        self._message(encode_end(end))
        for fd in (1, 2):
            self.end_of_output(fd)
        self.log.streams[MESSAGES].closed = True
        self.event(Exited(end.exit_code or 0, end.ended, end.usage))

    def failed(self, error: SandboxError) -> None:
        raise RuntimeError("a context on this machine reports every end") from error

    def _control(self, control: dict[str, Any]) -> None:
        match control:
            case {"op": "signal", "signum": 2} | {"op": "end", "cause": "closed" | "timeout"}:
                self.end("interrupt")
            case _:
                raise WireError("unknown control of a cell; accepted are SIGINT and end")


class _Starter:
    """Starts a cell where ``ServerRun.start`` expects a transport."""

    def __init__(self, cell: ServerCell, context: ServerContext) -> None:
        self._cell = cell
        live = context.live
        self.isolation = None if live is None else live.isolation

    async def start(self, _spec: RunSpec, _sink: Sink) -> _CellHandle:
        return self._cell.launch()


class _CellHandle(_Handle):
    def __init__(self, live: LocalContext, cell: ServerCell) -> None:
        super().__init__(live.isolation)
        self._live = live
        self._cell = cell

    def resume(self, fd: int) -> None:  # noqa: ARG002 - all streams of a cell continue together
        self._live.resume()

    def end(self, cause: str) -> None:  # noqa: ARG002 - a cell is interrupted
        self._live.interrupt()
