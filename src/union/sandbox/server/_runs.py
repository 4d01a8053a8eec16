"""One run of a remote session: what the engine says is kept until the client has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from union.sandbox._core.events import Exited, Failed, Started
from union.sandbox._core.resolve import settled_window
from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import (
    MAX_CHUNK,
    STDIN_WINDOW,
    WINDOW,
    Kind,
    Offsets,
    Taken,
    WireError,
)
from union.sandbox._wire.run_log import RunLog, StreamLog
from union.sandbox._wire.values import encode_decision, encode_event, encode_started
from union.sandbox.errors import SandboxError, SandboxExecutionError
from union.sandbox.server._auth import Grant
from union.sandbox.server._records import RunRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from union.sandbox._core.events import Event
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._session.transport import Run, Transport

__all__ = ["LEAST_ROOM", "Buffers", "Listener", "ServerRun"]

LEAST_ROOM: Final = WINDOW // 8
"""What every stream may keep, however much the others do."""
_TOGETHER_S: Final = 0.005
"""To send costs more than to wait a little, where nobody looks on."""
_SMALL: Final = 32 * 1024
_MAX_EARLY_CALLS: Final = 4096


class Buffers:
    """How much output is kept: of all runs together, of a session, of some keys of a session."""

    def __init__(self, most: int, parent: Buffers | None = None) -> None:
        self.most = most
        self.held = 0
        self.parent = parent

    def add(self, size: int) -> None:
        """Count ``size`` bytes more, or less, here and in everything that this is a part of."""
        level: Buffers | None = self
        while level is not None:
            level.held += size
            level = level.parent

    def is_full(self, stream: StreamLog) -> bool:
        if stream.held < LEAST_ROOM:
            return False
        level: Buffers | None = self
        while level is not None:
            if level.held >= level.most:
                return True
            level = level.parent
        return stream.held >= WINDOW


class Listener(Protocol):
    """Whoever carries a run's frames to its client."""

    def notify(self, run: ServerRun, /) -> None:
        """There is something to send."""

    def superseded(self, run: ServerRun, /) -> None:
        """Another connection carries the run from here on."""


class ServerRun:
    """One run: the engine's sink on one side, a client that comes and goes on the other."""

    def __init__(
        self, number: int, spec: RunSpec, buffers: Buffers, grant: Grant | None = None
    ) -> None:
        self.number = number
        self.grant = grant or Grant()
        """Whose run it is: no other key can attach to it, feed it or end it."""
        self.request_digest = b""
        """Of the HTTP request that began it, where that can be sent again."""
        self.on_release: Callable[[ServerRun], None] | None = None
        """Called when it is attached to again, or forgotten."""
        self.kind = spec.kind
        self.started_at = asyncio.get_running_loop().time()
        wanted = {1: spec.stdout, 2: spec.stderr}
        self.log = RunLog({fd: StreamLog() for fd, mode in wanted.items() if mode != "devnull"})
        self.end_event: Exited | Failed | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the command has ended; its output may still be under way."""
        self.record = RunRecord(spec)
        """For whoever looks on; the run itself never reads it."""
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
        self._fed = 0
        self._taken = 0
        self._broken = False
        self._tell_taken = False
        self._pumping: asyncio.Task[None] | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._turn = False

    # Its life.

    async def start(self, transport: Transport) -> None:
        """Starts the command; a refusal becomes the run's one event."""
        spec, self._spec = self._spec, None  # it may be large, and is not needed again
        if spec is None:
            raise RuntimeError("a run is started once")
        try:
            run = await transport.start(spec, self)
        except SandboxError as exc:
            self._refuse(exc)
            return
        except BaseException:
            # The engine's own fault, or the server's end: no real exit, and the client is told so.
            error = SandboxExecutionError("the server could not start the command", stage="spawn")
            self._refuse(error)
            raise
        self._run = run
        early, self._early = self._early or [], None
        for event in early:
            isolation = run.isolation if run.isolation != transport.isolation else None
            self._record(event, isolation)
        for call in self._early_calls:
            call(run)
        self._early_calls.clear()
        for fd in tuple(self._paused):
            self._resume(fd)

    def refuse(self, error: SandboxError) -> None:
        """Ends a run that was never handed to the engine."""
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
        """What the engine holds of a run, such as its stdin, goes when nothing more can come."""
        if self.log.ended and all(stream.closed for stream in self.log.streams.values()):
            self._run = None

    def end(self, cause: str) -> None:
        self._when_there(lambda run: run.end(cause))

    def _when_there(self, call: Callable[[Run], None]) -> None:
        """Now, or as soon as the engine has started it."""
        if self._run is not None:
            call(self._run)
        elif not self.log.ended:
            if len(self._early_calls) >= _MAX_EARLY_CALLS:
                raise WireError("too many frames for a run that has not started")
            self._early_calls.append(call)

    # What the engine tells (the Sink protocol).

    def event(self, event: Event) -> None:
        if self._early is not None:
            self._early.append(event)
        else:
            self._record(event, None)

    def _record(self, event: Event, isolation: Isolation | None) -> None:
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
        self._count(stream.held - before)
        self.record.output(fd, data)
        if len(data) < _SMALL:
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
        if self.log.ended:
            self._notify()
        else:
            self._notify_soon()

    def decision(self, decision: Decision) -> None:
        self.log.events.append(encode_decision(decision))
        self.record.decision(decision)
        self._notify_soon()

    def _count(self, more: int) -> None:
        self._buffers.add(more)
        self._accounted += more

    def _resume(self, fd: int) -> None:
        run = self._run
        if run is not None and not self._buffers.is_full(self.log.streams[fd]):
            self._paused.discard(fd)
            run.resume(fd)

    # What the client tells.

    def ack(self, known: Offsets) -> None:
        self.log.ack(known)
        self._after_ack()

    def _after_ack(self) -> None:
        self._count(self.log.held - self._accounted)
        for fd in tuple(self._paused):
            self._resume(fd)

    def take(self, frame: wire.Frame) -> None:
        """A STDIN or CONTROL frame; one that came before is not obeyed twice."""
        number, data = wire.decode_numbered(frame.payload)
        if number > self._received + 1:
            raise WireError(f"frame {number} of a run follows {self._received}")
        self._tell_taken = True
        self._notify()
        if number <= self._received:
            return
        self._received = number
        if frame.kind is Kind.STDIN:
            self._feed(data)
        else:
            self._control(wire.parse_json(data))

    def _feed(self, data: bytes) -> None:
        if self._fed + len(data) - self._taken > STDIN_WINDOW + MAX_CHUNK:
            raise WireError("more stdin than there is room for")
        self._fed += len(data)
        self._when_there(lambda run: run.feed_stdin(data))
        self._when_there(lambda _: self._pump())

    def _pump(self) -> None:
        if self._pumping is None and not self._broken:
            self._pumping = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Tells the client how much of stdin the command has taken."""
        while self._run is not None and self._taken < self._fed and not self._broken:
            fed = self._fed
            try:
                await self._run.drain_stdin()
            except BrokenPipeError:
                self._broken = True
            self._taken = fed
            self._tell_taken = True
            self._notify()
        self._pumping = None

    def _control(self, told: dict[str, Any]) -> None:
        match told:
            case {"op": "signal", "signum": int(signum)} if 0 < signum < 65:
                self._when_there(lambda run: run.signal(signum))
            case {"op": "end", "cause": ("closed" | "timeout") as cause}:
                self.end(cause)
            case {"op": "resize", "rows": int(rows), "cols": int(cols)}:
                settled_window("rows, cols", rows, cols)
                self._when_there(lambda run: run.resize(rows, cols))
            case {"op": "eof"}:
                self._when_there(lambda run: run.close_stdin())
            case _:
                raise WireError("a control that does not exist")

    # Whoever carries it.

    def attach(self, listener: Listener, known: Offsets | None) -> None:
        """From now on this one carries the run; ``known`` is what the client has already."""
        self._release()
        before = self._listener
        if known is not None:
            self.log.rewind(known)
        self._listener = listener
        if before is not None and before is not listener:
            before.superseded(self)
        if known is not None:
            self._tell_taken = True
            self._after_ack()
        self._notify()

    def detach(self, listener: Listener) -> bool:
        """The connection is gone; False if another one carries the run by now."""
        if self._listener is not listener:
            return False
        self._listener = None
        return True

    def drop_output(self) -> None:
        """Keep no output any more of a run that has ended; that it was run stays known."""
        log = self.log
        for stream in log.streams.values():
            stream.sent = stream.end
        known = {fd: stream.end for fd, stream in log.streams.items()}
        log.ack(Offsets(known.get(1, 0), known.get(2, 0), log.events.acked))
        self._after_ack()

    @property
    def is_attached(self) -> bool:
        return self._listener is not None

    def let_go(self) -> None:
        """Nobody will ask for it any more: the session has closed, or the client has it all."""
        if self._pumping is not None:
            self._pumping.cancel()
        if self._soon is not None:
            self._soon.cancel()
        self._buffers.add(-self._accounted)
        self._accounted = 0
        self._release()

    def _release(self) -> None:
        release, self.on_release = self.on_release, None
        if release is not None:
            release(self)

    def _notify(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._listener is not None:
            self._listener.notify(self)

    def _notify_soon(self) -> None:
        """At once if the caller looks on; else with what follows, which is often the end."""
        if self._is_live:
            self._notify()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_TOGETHER_S, self._notify)

    @property
    def has_more(self) -> bool:
        """Something can be sent now. Output of a run that is just being started waits for it."""
        return self._tell_taken or (self._early is None and self.log.has_more)

    def frames(self, budget: int) -> Iterator[bytes]:
        """What is to be sent next, about ``budget`` bytes of it; ``Started`` before any output.

        Frames, one behind the other; the bytes of output are a piece by themselves.
        """
        number = self.number
        if self._tell_taken:
            self._tell_taken = False
            yield wire.encode_taken(number, Taken(self._received, self._taken, self._broken))
        if self._early is not None:
            return
        for index, event in self.log.events.unsent(budget):
            budget -= len(event)
            yield wire.encode_numbered(Kind.EVENT, number, index, event)
        # In turns, so that a stream with much to say does not silence the other.
        self._turn = not self._turn
        for fd in (1, 2) if self._turn else (2, 1):
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
