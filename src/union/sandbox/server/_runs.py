"""One run on a server: its events and output are kept until the client has received them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from union.sandbox._core.events import Exited, Failed, Started
from union.sandbox._core.resolve import validate_window
from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import (
    MAX_CHUNK,
    MESSAGES,
    STDIN_WINDOW,
    Kind,
    Offsets,
    Taken,
    WireError,
)
from union.sandbox._wire.run_log import RunLog, StreamLog
from union.sandbox._wire.values import encode_decision, encode_event, encode_request, encode_started
from union.sandbox.errors import SandboxError, SandboxExecutionError
from union.sandbox.server._auth import Grant
from union.sandbox.server._records import RunRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from union.sandbox._core.events import Event
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._session.transport import Run, Transport
    from union.sandbox.server._quotas import Buffers

__all__ = ["Listener", "ServerRun"]

_COALESCE_S: Final = 0.005
"""Delay that combines small pieces into one message, if the client does not stream."""
_SMALL_OUTPUT: Final = 32 * 1024
_MAX_EARLY_CALLS: Final = 4096


class Listener(Protocol):
    """Sends the frames of a run to its client."""

    def notify(self, run: ServerRun, /) -> None:
        """The run has frames to send."""

    def superseded(self, run: ServerRun, /) -> None:
        """Another connection has attached to the run."""


class ServerRun:
    """One run: a sink for the engine, and a log for a client that may reconnect."""

    def __init__(
        self, number: int, spec: RunSpec, buffers: Buffers, grant: Grant | None = None
    ) -> None:
        self.number = number
        self.grant = grant or Grant()
        """Grant of the client that started it; other keys cannot attach, write stdin or end it."""
        self.request_digest = b""
        """Digest of the HTTP request that started it, if the request can be repeated."""
        self.on_release: Callable[[ServerRun], None] | None = None
        """Called when a client attaches again, or when the run is forgotten."""
        self.kind = spec.kind
        self.started_at = asyncio.get_running_loop().time()
        wanted = {1: spec.stdout, 2: spec.stderr}
        self.log = RunLog({fd: StreamLog() for fd, mode in wanted.items() if mode != "devnull"})
        self.end_event: Exited | Failed | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the command has ended; output may still follow."""
        self.record: RunRecord = RunRecord(spec)
        """For the console; the run itself does not read it."""
        self.record.end_run = self.end
        self._spec: RunSpec | None = spec
        self._is_live = spec.background or "pipe" in {spec.stdout, spec.stderr, spec.stdin}
        self._buffers = buffers
        self._accounted = 0
        self._listener: Listener | None = None
        self._run: Run | None = None
        self._early: list[Event] | None = []
        self._early_calls: list[Callable[[Run], None]] = []
        self._paused: set[int] = set()
        self._received = 0
        self._stdin_fed = 0
        self._stdin_taken = 0
        self._stdin_broken = False
        self._taken_pending = False
        self._drain_task: asyncio.Task[None] | None = None
        self._notify_timer: asyncio.TimerHandle | None = None
        self._stderr_first = True
        self.attachments = 0
        """How often a connection was attached."""
        self.is_urgent = False
        """Whether its frames are sent before those of other runs."""

    # Start and end.

    async def start(self, transport: Transport) -> None:
        """Start the command; a refusal becomes the only event of the run."""
        spec, self._spec = self._spec, None  # It may be large and is not needed again.
        if spec is None:
            raise RuntimeError("start() was called twice")
        try:
            run = await transport.start(spec, self)
        except SandboxError as exc:
            self._refuse(exc)
            return
        except BaseException:
            # An internal error, or the server is shutting down: the client gets a refusal.
            error = SandboxExecutionError("the server could not start the command", stage="spawn")
            self._refuse(error)
            raise
        self._run = run
        early, self._early = self._early or [], None
        usual, own = transport.isolation, run.isolation
        # A client that did not take the checkpoint does not know of the layers.
        is_usual = (own is usual or own == usual) and own.layers == "plain"
        isolation = None if is_usual else own
        for event in early:
            self._log_event(event, isolation)
        while self._early_calls:
            self._early_calls.pop(0)(run)
        for fd in tuple(self._paused):
            self._resume(fd)

    def refuse(self, error: SandboxError) -> None:
        """End a run that was not passed to the engine."""
        self._refuse(error)

    def _refuse(self, error: SandboxError) -> None:
        self._early = None
        for stream in self.log.streams.values():
            stream.closed = True
        self._finish(wire.to_json({"refused": encode_error(error)}))

    def _finish(self, event: bytes) -> None:
        self.log.events.append(event)
        self.log.ended = True
        self.record.ended(event, self.end_event)
        self._release_engine()
        if not self.over.done():
            self.over.set_result(None)
        self._notify()

    def _release_engine(self) -> None:
        """Release the engine's run, and its stdin, when neither events nor output can follow."""
        if self.log.ended and all(stream.closed for stream in self.log.streams.values()):
            self._run = None

    def end(self, cause: str) -> None:
        self._when_started(lambda run: run.end(cause))

    def _when_started(self, call: Callable[[Run], None]) -> None:
        """Call now, or as soon as the engine has started the command."""
        if self._run is not None:
            call(self._run)
        elif not self.log.ended:
            if len(self._early_calls) >= _MAX_EARLY_CALLS:
                raise WireError(
                    f"too many frames for a run that has not started (limit {_MAX_EARLY_CALLS})"
                )
            self._early_calls.append(call)

    # Events of the engine (the Sink protocol).

    def event(self, event: Event) -> None:
        if self._early is not None:
            self._early.append(event)
        else:
            self._log_event(event, None)

    def _log_event(self, event: Event, isolation: Isolation | None) -> None:
        if isinstance(event, Started):
            self.log.events.append(encode_started(event, isolation))
            self.record.started(event, isolation)
            self._notify_soon()
            return
        self.end_event = event
        if isinstance(event, Failed):
            for stream in self.log.streams.values():
                stream.closed = True
        self._finish(encode_event(event))

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        data = bytes(data)
        stream = self.log.streams[fd]
        before = stream.held
        stream.append(data)
        self._account(stream.held - before)
        self.record.output(fd, data)
        if len(data) < _SMALL_OUTPUT:
            self._notify_soon()
        else:
            self._notify()
        if self._buffers.is_full(stream):
            self._paused.add(fd)
            return False
        return True

    def end_of_output(self, fd: int) -> None:
        self.log.streams[fd].closed = True
        self.record.end_of_output(fd)
        self._release_engine()
        notify = self._notify if self.log.ended else self._notify_soon
        notify()

    def decision(self, decision: Decision) -> None:
        self.log.events.append(encode_decision(decision))
        self.record.decision(decision)
        self._notify_soon()

    def request(self, request: HttpRequest) -> None:
        self.log.events.append(encode_request(request))
        self.record.request(request)
        self._notify_soon()

    def _account(self, more: int) -> None:
        self._buffers.add(more)
        self._accounted += more

    def _resume(self, fd: int) -> None:
        run = self._run
        if run is not None and not self._buffers.is_full(self.log.streams[fd]):
            self._paused.discard(fd)
            run.resume(fd)

    # Frames of the client.

    def ack(self, known: Offsets) -> None:
        self.log.ack(known)
        self._after_ack()

    def _after_ack(self) -> None:
        self._account(self.log.held - self._accounted)
        for fd in tuple(self._paused):
            self._resume(fd)

    def handle_frame(self, frame: wire.Frame) -> None:
        """Handle a STDIN or CONTROL frame; a repeated frame has no effect."""
        number, data = wire.decode_numbered(frame.payload)
        if number > self._received + 1:
            raise WireError(f"frame {number} of a run must be {self._received + 1}")
        self._taken_pending = True
        self._notify()
        if number <= self._received:
            return
        self._received = number
        if frame.kind is Kind.STDIN:
            self._feed_stdin(data)
        else:
            self._control(wire.parse_json(data))

    def _feed_stdin(self, data: bytes) -> None:
        if self._stdin_fed + len(data) - self._stdin_taken > STDIN_WINDOW + MAX_CHUNK:
            raise WireError(f"stdin exceeds the window of {STDIN_WINDOW} bytes")
        self._stdin_fed += len(data)
        self._when_started(lambda run: run.feed_stdin(data))
        self._when_started(lambda _: self._start_drain())

    def _start_drain(self) -> None:
        if self._drain_task is None and not self._stdin_broken:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Report to the client how much of stdin the command has read."""
        while (
            self._run is not None and self._stdin_taken < self._stdin_fed and not self._stdin_broken
        ):
            fed = self._stdin_fed
            try:
                await self._run.drain_stdin()
            except BrokenPipeError:
                self._stdin_broken = True
            self._stdin_taken = fed
            self._taken_pending = True
            self._notify()
        self._drain_task = None

    def _control(self, control: dict[str, Any]) -> None:
        match control:
            case {"op": "signal", "signum": int(signum)} if 0 < signum < 65:
                self._when_started(lambda run: run.signal(signum))
            case {"op": "end", "cause": ("closed" | "timeout") as cause}:
                self.end(cause)
            case {"op": "resize", "rows": int(rows), "cols": int(cols)}:
                validate_window("rows, cols", rows, cols)
                self._when_started(lambda run: run.resize(rows, cols))
            case {"op": "eof"}:
                self._when_started(lambda run: run.close_stdin())
            case _:
                raise WireError("unknown control; accepted are signal, end, resize and eof")

    # Connections.

    def attach(self, listener: Listener, known: Offsets | None) -> None:
        """Send the run to this listener from now on; ``known`` is what the client has received."""
        self._stop_keeping()
        before = self._listener
        if known is not None:
            self.log.rewind(known)
        self._listener = listener
        self.attachments += 1
        if before is not None and before is not listener:
            before.superseded(self)
        if known is not None:
            self._taken_pending = True
            self._after_ack()
        self._notify()

    def detach(self, listener: Listener) -> bool:
        """Detach a listener whose connection is closed; return False if another one is attached."""
        if self._listener is not listener:
            return False
        self._listener = None
        return True

    def drop_output(self) -> None:
        """Drop the output of a run that has ended; the run itself stays known."""
        log = self.log
        for stream in log.streams.values():
            stream.sent = stream.end
        known = {fd: stream.end for fd, stream in log.streams.items()}
        log.ack(Offsets.of(known, log.events.acked))
        self._after_ack()

    @property
    def is_attached(self) -> bool:
        return self._listener is not None

    def release(self) -> None:
        """Release timers and buffers: the session has closed, or the client has everything."""
        if self._drain_task is not None:
            self._drain_task.cancel()
        if self._notify_timer is not None:
            self._notify_timer.cancel()
        self._buffers.add(-self._accounted)
        self._accounted = 0
        self._stop_keeping()

    def _stop_keeping(self) -> None:
        release, self.on_release = self.on_release, None
        if release is not None:
            release(self)

    def _notify(self) -> None:
        if self._notify_timer is not None:
            self._notify_timer.cancel()
            self._notify_timer = None
        if self._listener is not None:
            self._listener.notify(self)

    def _notify_soon(self) -> None:
        """Notify at once if the client streams, else after a short delay, often with the end."""
        if self._is_live:
            self._notify()
        elif self._notify_timer is None:
            self._notify_timer = asyncio.get_running_loop().call_later(_COALESCE_S, self._notify)

    @property
    def has_more(self) -> bool:
        """Whether frames can be sent now; the output of a run that is being started waits."""
        return self._taken_pending or (self._early is None and self.log.has_more)

    def frames(self, budget: int) -> Iterator[bytes]:
        """Yield the next frames, about ``budget`` bytes; ``Started`` comes before any output.

        Output is yielded as two pieces: the head of the frame and its bytes.
        """
        number = self.number
        if self._taken_pending:
            self._taken_pending = False
            yield wire.encode_taken(
                number, Taken(self._received, self._stdin_taken, self._stdin_broken)
            )
        if self._early is not None:
            return
        for index, event in self.log.events.unsent(budget):
            budget -= len(event)
            yield wire.encode_numbered(Kind.EVENT, number, index, event)
        # The streams take turns, so that one with much output does not block the other. A display
        # is sent before output that follows it.
        self._stderr_first = not self._stderr_first
        for fd in (MESSAGES, 2, 1) if self._stderr_first else (MESSAGES, 1, 2):
            stream = self.log.streams.get(fd)
            if stream is None:
                continue
            for offset, data in stream.unsent(budget):
                budget -= len(data)
                yield wire.encode_output_head(number, fd, offset, len(data))
                yield data
            if stream.closed and stream.sent == stream.end and not stream.closed_sent:
                stream.closed_sent = True
                yield wire.encode_end_of_output(number, fd, stream.end)
