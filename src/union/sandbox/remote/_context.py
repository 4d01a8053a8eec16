"""A context on a server: one run for its interpreter, and one for each of its cells."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import signal
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._contexts.values import CellEnd
from union.sandbox._contexts.wire import (
    MessageReader,
    Shown,
    decode_change,
    encode_cell,
    encode_context,
)
from union.sandbox._core.events import Exited, Failed
from union.sandbox._policy.entries import has_http
from union.sandbox._wire.errors import decode_error
from union.sandbox._wire.frames import MESSAGES, WireError
from union.sandbox._wire.process_values import decode_processes
from union.sandbox.errors import SandboxConnectionError, SandboxError, SandboxUsageError
from union.sandbox.remote._run import RemoteRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._contexts.specs import CellSink, CellSpec, ContextSpec
    from union.sandbox._contexts.wire import ContextChange
    from union.sandbox._core.events import Event
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.entries import Entry
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._wire.values import SessionInfo
    from union.sandbox.remote._admission import Slot
    from union.sandbox.remote._connection import ClientConnection
    from union.sandbox.remote._http_entries import SentEntries

__all__ = ["RemoteContext", "start_context"]

_START_S: Final = 120.0
"""How long a server may take to start the interpreter of a context."""
_CLOSE_S: Final = 20.0
_REPLY_S: Final = 90.0
"""How long a server may take to reply to a request about a context."""
_MAX_BETWEEN: Final = 64 * 1024
"""Output of each stream to keep that no cell wrote; an honest server sends no more."""
_NO_ANSWER: Final = "the server is overloaded, stuck or hostile"


def _error_of(failed: Failed) -> SandboxConnectionError:
    return SandboxConnectionError(
        failed.reason, sent=True, code=failed.code or "connection", hint=failed.hint
    )


class _ContextRun(RemoteRun):
    """The run of an interpreter: its events are changes of its state, and replies."""

    max_events = 2**32 - 1
    """Each is handled and forgotten, and a context may be restarted any number of times."""
    context: RemoteContext

    def _on_change(self, fields: dict[str, Any]) -> None:
        self._event_bytes = 0
        self.context.on_change(decode_change(fields))

    def request(self, number: int, operation: str, **fields: Any) -> None:
        self._control(op=operation, request=number, **fields)


class RemoteContext:
    """A context on a server (the LiveContext protocol, and the Sink of its run).

    Args:
        spec: the context.
        session: its session.
        isolation: the isolation of the session, until the server reports that of the context.

    """

    def __init__(
        self,
        spec: ContextSpec,
        session: SessionSpec,
        *,
        isolation: Isolation,
        entries: Callable[[], SentEntries],
    ) -> None:
        self._entries = entries
        self._spec = spec
        self._session = session
        self._isolation = isolation
        self._connection: ClientConnection | None = None
        self._run: _ContextRun | None = None
        self._cell: _CellReceiver | None = None
        self._generation = 0
        self._alive = True
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._sent = 0
        self._begins = {1: 0, 2: 0}
        """Offsets at which the output of this generation begins."""
        self._received = {1: 0, 2: 0}
        self._between = {1: bytearray(), 2: bytearray()}

    def new_run(self, connection: ClientConnection, slot: Slot) -> _ContextRun:
        """Return the run that starts the interpreter."""
        run = _ContextRun(
            secrets.randbits(63),
            encode_context(self._spec),
            self,
            connection=connection,
            isolation=self._isolation,
            fds={1, 2},
            slot=slot,
        )
        run.context = self
        self._connection, self._run = connection, run
        return run

    def _opened(self) -> tuple[ClientConnection, _ContextRun]:
        if self._connection is None or self._run is None:
            raise RuntimeError("the context has not started")
        return self._connection, self._run

    # The Sink of the interpreter's run.

    def event(self, event: Event) -> None:
        if isinstance(event, Exited | Failed):
            self._alive = False
            error: SandboxError = SandboxConnectionError(
                "the server has ended the context", sent=True, code="context-lost"
            )
            if isinstance(event, Failed):
                error = _error_of(event)
            requests, self._requests = self._requests, {}
            for reply in requests.values():
                if not reply.done():
                    reply.set_exception(error)
            if not self._ended.done():
                self._ended.set_result(None)

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        skipped = max(0, self._begins[fd] - self._received[fd])
        self._received[fd] += len(data)
        kept = self._between[fd]
        kept += data[skipped:][: max(0, _MAX_BETWEEN - len(kept))]
        return True

    def end_of_output(self, fd: int) -> None:
        """Nothing to do: the event says that the context has ended."""

    def decision(self, decision: Decision) -> None:
        """Decisions belong to cells."""

    def request(self, request: HttpRequest) -> None:
        """Requests belong to cells."""

    def on_change(self, change: ContextChange) -> None:
        """Receive a change of state, or a reply."""
        if change.generation != self._generation:
            if change.generation < self._generation:
                raise WireError("a context returned to an earlier generation")
            self._generation = change.generation
            for fd, at in zip((1, 2), change.at, strict=True):
                # Events are sent before output: all that is held is of earlier generations.
                self._between[fd].clear()
                self._begins[fd] = at
        self._alive = change.alive
        reply = self._requests.pop(change.reply, None)
        if reply is None or reply.done():
            return
        if change.error is not None:
            reply.set_exception(decode_error(change.error))
        else:
            reply.set_result(change.value)

    # The LiveContext protocol.

    @property
    def isolation(self) -> Isolation:
        return self._opened()[1].isolation

    @property
    def is_alive(self) -> bool:
        return self._alive and self._run is not None

    @property
    def between(self) -> tuple[bytes, bytes]:
        return bytes(self._between[1]), bytes(self._between[2])

    def start(self, number: int, spec: CellSpec, sink: CellSink) -> None:
        entries = self._entries() if has_http(spec.network) else None
        body = self._encode(number, spec, entries)
        again = None
        if entries is not None:

            def again() -> None:
                entries.forget()
                self._start(spec, self._encode(number, spec, entries), sink)

        self._start(spec, body, sink, again)
        if entries is not None and self._cell is not None and self._cell.run is not None:
            self._cell.run.started.add_done_callback(
                functools.partial(_confirm, entries, spec.network.allow)
            )

    def _encode(self, number: int, spec: CellSpec, entries: SentEntries | None) -> bytes:
        _, context = self._opened()
        return encode_cell(spec, self._session, entries, context=context.number, number=number)

    def _start(
        self,
        spec: CellSpec,
        body: bytes,
        sink: CellSink,
        again: Callable[[], None] | None = None,
    ) -> None:
        connection, context = self._opened()
        cell = self._cell = _CellReceiver(self, sink, self._generation)
        cell.again = again
        limit_s = None if spec.timeout_s is None else spec.timeout_s + self._spec.interrupt_grace_s
        run = RemoteRun(
            secrets.randbits(63),
            body,
            cell,
            connection=connection,
            isolation=context.isolation,
            fds={1, 2, MESSAGES},
            timeout_s=limit_s,
        )
        cell.run = run
        run.started.add_done_callback(cell.on_started)
        if connection.closed.is_set():
            why = "the connection was lost" if connection.lost is None else connection.lost.args[0]
            run.fail(str(why), code="session-lost", hint="open a new session")
            return
        run.watch()
        connection.begin(run)

    def lost_with(self, generation: int) -> None:
        """Record that a cell has reported the loss of its interpreter."""
        if generation == self._generation:
            self._alive = False

    def interrupt(self) -> None:
        if self._cell is not None and self._cell.run is not None:
            self._cell.run.signal(signal.SIGINT)

    def resume(self) -> None:
        if self._cell is not None and self._cell.run is not None:
            for fd in (1, 2):
                self._cell.run.resume(fd)

    async def processes(self) -> tuple[ProcessInfo, ...]:
        if not self.is_alive or self._ended.done():
            return ()
        reply = await self._request("processes")
        try:
            return decode_processes(reply)
        except (KeyError, TypeError, WireError) as exc:
            raise SandboxConnectionError(
                f"the server violated the protocol: {exc}",
                sent=True,
                code="protocol",
                hint="the server is faulty or hostile: do not use it",
            ) from exc

    async def restart(self) -> None:
        await self._request("restart")

    async def _request(self, operation: str, **fields: Any) -> Any:
        _, run = self._opened()
        if self._ended.done():
            raise SandboxConnectionError(
                "the context has ended on its server",
                sent=True,
                code="context-lost",
                hint="open a new context",
            )
        self._sent += 1
        number = self._sent
        reply = self._requests[number] = asyncio.get_running_loop().create_future()
        run.request(number, operation, **fields)
        try:
            async with asyncio.timeout(_REPLY_S):
                return await reply
        except TimeoutError:
            raise SandboxConnectionError(
                f"the server did not reply to {operation!r} within {_REPLY_S:g} s",
                sent=True,
                code="no-answer",
                hint=_NO_ANSWER,
            ) from None
        finally:
            self._requests.pop(number, None)

    async def aclose(self) -> None:
        _, run = self._opened()
        if self._ended.done():
            return
        run.end("closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self._ended)
                if self._cell is not None:
                    await asyncio.shield(self._cell.over)
        if not self._ended.done():
            run.fail("the server did not confirm the end of the context", code="no-answer")


async def start_context(
    spec: ContextSpec,
    session: SessionSpec,
    info: SessionInfo,
    start: Callable[[Callable[[ClientConnection, Slot], _ContextRun], None], Awaitable[Any]],
    *,
    endpoint: str,
    entries: Callable[[], SentEntries],
) -> RemoteContext:
    """Start the interpreter of a context on a server.

    Args:
        spec: the context.
        session: its session.
        info: the description of the session by its server.
        start: sends a run when it is admitted, and returns when it has started.
        endpoint: the address of the server, for errors.
        entries: returns the ``Http`` entries of the session.

    """
    if not info.has_contexts:
        raise SandboxUsageError(
            "this server cannot run contexts",
            code="context-unsupported",
            hint="update sandbox-server, or use run_code() for code without earlier state",
        )
    context = RemoteContext(spec, session, isolation=info.isolation, entries=entries)
    try:
        async with asyncio.timeout(_START_S):
            await start(context.new_run, None)
    except TimeoutError:
        raise SandboxConnectionError(
            f"the server did not start the context within {_START_S:g} s",
            endpoint=endpoint,
            sent=True,
            code="no-answer",
            hint=_NO_ANSWER,
        ) from None
    return context


def _confirm(entries: SentEntries, allow: tuple[Entry, ...], started: asyncio.Future[None]) -> None:
    """Record that the server has the secrets of a cell that it has started."""
    if not started.cancelled() and started.exception() is None:
        entries.confirm(allow)


class _CellReceiver:
    """The Sink of a cell's run: puts displays and output back in order, and ends exactly once."""

    def __init__(self, context: RemoteContext, sink: CellSink, generation: int) -> None:
        self.run: RemoteRun | None = None
        self.again: Callable[[], None] | None = None
        """Sends the cell again, with its secrets; None if it was."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._sink = sink
        self._generation = generation
        self._reader = MessageReader()
        self._delivered = {1: 0, 2: 0}
        self._shown: deque[Shown] = deque()
        """Displays that follow output which was not delivered yet."""
        self._end: CellEnd | None = None
        self._open = {1, 2, MESSAGES}
        self._has_exited = False

    def on_started(self, started: asyncio.Future[None]) -> None:
        """End the cell if the server refused it."""
        if not started.cancelled() and isinstance(error := started.exception(), SandboxError):
            if error.code == "secret-dropped" and self.again is not None and not self.over.done():
                self.over.set_result(None)
                self.again()
            else:
                self._fail(error)

    def _fail(self, error: SandboxError) -> None:
        if not self.over.done():
            self.over.set_result(None)
            self._sink.failed(error)

    # The Sink protocol.

    def event(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._fail(_error_of(event))
        elif isinstance(event, Exited):
            self._has_exited = True
            self._finish_if_over()

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        if fd == MESSAGES:
            for message in self._reader.feed(data):
                if isinstance(message, CellEnd):
                    self._end = message
                else:
                    self._shown.append(message)
                    self._show()
            return True
        has_room = True
        while len(data):
            # A display that follows a part of these bytes is delivered right after that part.
            size = len(data)
            if self._shown and (left := self._shown[0].at[fd - 1] - self._delivered[fd]) > 0:
                size = min(size, left)
            has_room = self._sink.output(fd, data[:size]) and has_room
            self._delivered[fd] += size
            data = data[size:]
            self._show()
        return has_room

    def end_of_output(self, fd: int) -> None:
        self._open.discard(fd)
        self._finish_if_over()

    def decision(self, decision: Decision) -> None:
        self._sink.decision(decision)

    def request(self, request: HttpRequest) -> None:
        self._sink.request(request)

    def _show(self, *, everything: bool = False) -> None:
        while self._shown:
            first = self._shown[0]
            if not everything and any(
                self._delivered[fd] < first.at[fd - 1] for fd in (1, 2) if fd in self._open
            ):
                return
            self._shown.popleft()
            self._sink.display(first.bundle)

    def _finish_if_over(self) -> None:
        if self._open or not self._has_exited or self.over.done():
            return
        if self._end is None:
            self._fail(
                SandboxConnectionError(
                    "the server violated the protocol: a cell ended without a report of its end",
                    sent=True,
                    code="protocol",
                    hint="the server is faulty or hostile: do not use it",
                )
            )
            return
        self._show(everything=True)
        if self._end.state == "lost":
            self._context.lost_with(self._generation)
        self.over.set_result(None)
        self._sink.done(self._end)
