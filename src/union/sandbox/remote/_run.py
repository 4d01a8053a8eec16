"""One command on a server: what arrives goes to the sink, in order and once, whatever happens."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.events import Failed
from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import decode_error
from union.sandbox._wire.frames import MAX_CHUNK, STDIN_WINDOW, WINDOW, Kind, Offsets, WireError
from union.sandbox._wire.values import decode_event, decode_isolation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.events import Exited, Started
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._session.transport import Sink
    from union.sandbox.errors import SandboxError
    from union.sandbox.remote._admission import Slot
    from union.sandbox.remote._link import Link

__all__ = ["RemoteRun"]

_ACK_EVERY: Final = WINDOW // 4
"""Each costs both sides a system call and a wake-up. A server that keeps less gets one later."""
_ACK_FRAMES: Final = 256
DEADLINE_GRACE_S: Final = 15.0
"""How long after its timeout a command may take to be reported as ended."""
REST_S: Final = 30.0
"""How long the output of a command that has ended may make no progress."""
MAX_EVENTS: Final = 10_100
"""A run has at most 10,000 network decisions, and few other events."""
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""All events of one run together."""
_SMALL: Final = 2048
_MOST_WAITING: Final = 2 * WINDOW
"""What a server may send of a stream that is not read; an honest one stops at the window."""


class _Inlet:
    """One stream on its way to the sink, which may ask for a pause."""

    def __init__(self) -> None:
        self.received = 0
        self.passed = 0
        """What the sink has, and does not object to."""
        self.acked = 0
        self.frames = 0
        self.paused = False
        self.closed = False
        self.over = False
        """The sink was told of the end."""
        self.waiting: deque[memoryview | bytes] = deque()
        self.held = 0
        """How much waits."""

    @property
    def wants_ack(self) -> bool:
        return self.passed - self.acked >= _ACK_EVERY or (
            self.frames >= _ACK_FRAMES and self.passed > self.acked
        )


class RemoteRun:
    """A command in flight (the Run protocol), carried by a link that may break and come back."""

    def __init__(
        self,
        number: int,
        body: bytes,
        sink: Sink,
        *,
        link: Link,
        isolation: Isolation,
        fds: set[int],
        timeout_s: float | None = None,
        slot: Slot | None = None,
    ) -> None:
        self.number = number
        self.isolation = isolation
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._sink = sink
        self._link = link
        self._inlets = {fd: _Inlet() for fd in fds}
        self._slot = slot
        self._was_started = False
        self._limit_s = None if timeout_s is None else timeout_s + DEADLINE_GRACE_S
        self._deadline: asyncio.TimerHandle | None = None
        self._events = 0
        self._event_bytes = 0
        self._ended = False
        self._sent = 0
        self._unconfirmed: deque[tuple[int, bytes]] = deque()
        """Upstream frames that the server has not said it got."""
        self._stdin: deque[bytes] = deque()
        self._stdin_queued = 0
        self._stdin_sent = 0
        self._stdin_taken = 0
        self._stdin_closing = False
        self._stdin_broken = False
        self._drainers: list[asyncio.Future[None]] = []

    # The deadline.

    def watch(self) -> None:
        """Begin to count: a server that does not report the end in time is not waited for."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._limit_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._limit_s, self._overdue)

    def _overdue(self) -> None:
        self.end("timeout")
        limit_s = (self._limit_s or 0.0) - DEADLINE_GRACE_S
        self.fail(
            f"the server did not report the end of a command with timeout_s={limit_s:g} within "
            f"{DEADLINE_GRACE_S:g} s of its timeout",
            code="no-answer",
            hint="the server is overloaded, stuck or hostile; the command may still run there",
        )

    def _await_rest(self) -> None:
        """The command has ended: what is left of its output must come, and come steadily."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        received = sum(inlet.received for inlet in self._inlets.values())
        self._deadline = loop.call_later(REST_S, self._check_rest, received)

    def _check_rest(self, before: int) -> None:
        received = sum(inlet.received for inlet in self._inlets.values())
        if received != before or any(inlet.paused for inlet in self._inlets.values()):
            self._await_rest()
            return
        self.fail(
            f"the command has ended, and the rest of its output did not come within {REST_S:g} s",
            code="no-answer",
        )

    def _leave(self) -> None:
        """The run is over for this side."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._link.forget(self)
        if self._slot is not None:
            self._slot.leave()

    # The link.

    def opening_frames(self) -> Iterator[bytes]:
        """What makes a server that may or may not know this run carry on with it."""
        if not self.started.done():
            yield from wire.encode_start(self.number, self._body)
        known = {fd: inlet.received for fd, inlet in self._inlets.items()}
        yield wire.encode_offsets(
            Kind.ATTACH, self.number, Offsets(known.get(1, 0), known.get(2, 0), self._events)
        )
        for _, frame in self._unconfirmed:
            yield frame

    def first_frames(self) -> Iterator[bytes]:
        """The start, on a connection that is known to be good."""
        yield from wire.encode_start(self.number, self._body)

    def receive(self, frame: wire.Frame) -> None:
        match frame.kind:
            case Kind.OUTPUT:
                self._on_output(*wire.decode_output(frame.payload))
            case Kind.END_OF_OUTPUT:
                fd, offset, _ = wire.decode_output(frame.payload)
                self._on_end_of_output(fd, offset)
            case Kind.EVENT:
                self._on_event(*wire.decode_numbered(frame.payload))
            case Kind.TAKEN:
                self._on_taken(wire.decode_taken(frame.payload))
            case Kind.UNKNOWN:
                self.fail("the server does not know the command any more", code="run-lost")
            case _:
                raise WireError(f"{frame.kind.name} is not for a client")

    def fail(self, reason: str, *, code: str = "connection", hint: str = "") -> None:
        """No end of this command will ever be seen, or not all of its output."""
        if self.has_ended:
            return
        self._ended = True
        for inlet in self._inlets.values():
            inlet.over = True
        self._sink.event(Failed("transport", reason, code, hint))
        self._settle()
        self._wake_drainers()
        self._leave()

    @property
    def has_ended(self) -> bool:
        """Whether all that there is to be told about it has come: its exit may overtake output."""
        return self._ended and all(inlet.closed or inlet.over for inlet in self._inlets.values())

    # Output.

    def _inlet(self, fd: int) -> _Inlet:
        try:
            return self._inlets[fd]
        except KeyError:
            raise WireError(f"output of a stream that was not asked for: {fd}") from None

    def _on_output(self, fd: int, offset: int, data: memoryview) -> None:
        inlet = self._inlet(fd)
        if offset > inlet.received:
            raise WireError(f"output at {offset}; {inlet.received} bytes came before")
        data = data[inlet.received - offset :] if offset < inlet.received else data
        if not data or inlet.closed:
            return
        inlet.received += len(data)
        self._link.is_useful = True
        # A piece that is most of its message is kept with it; any other would keep too much.
        kept = data if 2 * len(data) > len(data.obj) else bytes(data)  # type: ignore[arg-type]  # of bytes
        if inlet.paused:
            if len(kept) < _SMALL and inlet.waiting and len(inlet.waiting[-1]) < _SMALL:
                # Bytes that come one by one must not cost an object each.
                inlet.waiting[-1] = bytes(inlet.waiting[-1]) + kept
            else:
                inlet.waiting.append(kept)
            inlet.held += len(kept)
            if inlet.held > _MOST_WAITING:
                raise WireError(f"{inlet.held} bytes of output beyond the window")
        else:
            self._pass_on(fd, inlet, kept)
            self._ack_if_due(inlet)

    def _pass_on(self, fd: int, inlet: _Inlet, data: bytes | memoryview) -> None:
        inlet.frames += 1
        if inlet.over:
            return
        if self._sink.output(fd, data):
            inlet.passed += len(data)
        else:
            inlet.paused = True

    def _on_end_of_output(self, fd: int, offset: int) -> None:
        inlet = self._inlet(fd)
        if offset != inlet.received:
            raise WireError(f"a stream of {inlet.received} bytes cannot end at {offset}")
        inlet.closed = True
        self._end_if_all_passed(fd, inlet)

    def _end_if_all_passed(self, fd: int, inlet: _Inlet) -> None:
        if inlet.closed and not inlet.waiting and not inlet.over:
            inlet.over = True
            inlet.passed = inlet.received
            self._sink.end_of_output(fd)
            self._finish_if_over()

    def resume(self, fd: int) -> None:
        # Not now: whoever makes room is in the middle of taking what came before.
        if self._inlets[fd].paused:
            asyncio.get_running_loop().call_soon(self._go_on, fd)

    def _go_on(self, fd: int) -> None:
        inlet = self._inlets[fd]
        if not inlet.paused:
            return
        inlet.paused = False
        inlet.passed = inlet.received - inlet.held
        while inlet.waiting and not inlet.paused:
            data = inlet.waiting.popleft()
            inlet.held -= len(data)
            self._pass_on(fd, inlet, data)
        self._ack_if_due(inlet)
        self._end_if_all_passed(fd, inlet)

    def _ack_if_due(self, inlet: _Inlet) -> None:
        if inlet.wants_ack:
            self._link.ack_now(self)
        elif inlet.passed > inlet.acked:
            self._link.ack_later(self)

    def ack(self) -> bytes:
        """Says what the server need not keep any more."""
        for inlet in self._inlets.values():
            inlet.acked = inlet.passed
            inlet.frames = 0
        known = {fd: inlet.passed for fd, inlet in self._inlets.items()}
        return wire.encode_offsets(
            Kind.ACK, self.number, Offsets(known.get(1, 0), known.get(2, 0), self._events)
        )

    # Events.

    def _on_event(self, number: int, data: bytes) -> None:
        if number > self._events:
            raise WireError(f"event {number} of a run follows {self._events - 1}")
        if number < self._events:
            return
        self._events += 1
        self._event_bytes += len(data)
        if self._events > MAX_EVENTS or self._event_bytes > MAX_EVENT_BYTES:
            raise WireError(f"{self._events} events of {self._event_bytes} bytes for one run")
        self._link.is_useful = True
        name, value = decode_event(data)
        if self._ended:
            # The end is the last event: a second one would change how it was said to have ended.
            raise WireError(f"{name} after the end of a run")
        if self._was_started and name in {"started", "refused"}:
            raise WireError(f"{name} after the start of a run")
        match name:
            case "started":
                self._on_started(*value)
            case "decision":
                self._sink.decision(value)
            case "refused":
                self._refused(decode_error(value))
            case _:
                self._on_end(name, value)

    def _on_started(self, event: Started, isolation: object) -> None:
        if isinstance(isolation, dict):
            self.isolation = decode_isolation(isolation)
        self._was_started = True
        if self._slot is not None:
            self._slot.started()
        self.watch()
        self._sink.event(event)
        self._settle()

    def _on_end(self, name: str, event: Exited | Failed) -> None:
        self._ended = True
        if name == "failed":
            for inlet in self._inlets.values():
                inlet.over = True
        self._sink.event(event)
        self._settle()
        self._wake_drainers()
        self._await_rest()
        self._finish_if_over()

    def _refused(self, error: SandboxError) -> None:
        self._ended = True
        for inlet in self._inlets.values():
            inlet.over = True
        if not self.started.done():
            self.started.set_exception(error)
        self._finish_if_over()

    def _settle(self) -> None:
        self._body = b""
        if not self.started.done():
            self.started.set_result(None)

    def _finish_if_over(self) -> None:
        """Everything has arrived and was passed on: the server may forget the run."""
        if self._ended and all(inlet.over for inlet in self._inlets.values()):
            for inlet in self._inlets.values():
                inlet.passed = inlet.received
            self._link.ack_later(self)
            self._leave()

    # Upstream.

    def _send(self, kind: Kind, data: bytes) -> None:
        self._sent += 1
        frame = wire.encode_numbered(kind, self.number, self._sent, data)
        self._unconfirmed.append((self._sent, frame))
        self._link.send(frame)

    def _control(self, **told: Any) -> None:
        if not self._ended:
            self._send(Kind.CONTROL, wire.to_json(told))

    def signal(self, signum: int) -> None:
        self._control(op="signal", signum=int(signum))

    def end(self, cause: str) -> None:
        self._control(op="end", cause=cause)

    def resize(self, rows: int, cols: int) -> None:
        self._control(op="resize", rows=rows, cols=cols)

    def _on_taken(self, taken: wire.Taken) -> None:
        if taken.number > self._sent or taken.stdin > self._stdin_sent:
            raise WireError("a server cannot have taken more than it was sent")
        while self._unconfirmed and self._unconfirmed[0][0] <= taken.number:
            self._unconfirmed.popleft()
        self._stdin_taken = max(self._stdin_taken, taken.stdin)
        if taken.broken:
            self._stdin_broken = True
            self._stdin.clear()
        self._pump()
        if self._stdin_broken or self._stdin_taken >= self._stdin_queued:
            self._wake_drainers()

    def feed_stdin(self, data: bytes) -> None:
        if self._stdin_broken or self._ended:
            return
        self._stdin_queued += len(data)
        for at in range(0, len(data), MAX_CHUNK):
            self._stdin.append(data[at : at + MAX_CHUNK])
        self._pump()

    def _pump(self) -> None:
        while self._stdin and self._stdin_sent - self._stdin_taken < STDIN_WINDOW:
            data = self._stdin.popleft()
            self._stdin_sent += len(data)
            self._send(Kind.STDIN, data)
        if self._stdin_closing and not self._stdin:
            self._stdin_closing = False
            self._control(op="eof")

    async def drain_stdin(self) -> None:
        while not self._stdin_broken and self._stdin_taken < self._stdin_queued:
            if self._ended:
                break
            waiter = asyncio.get_running_loop().create_future()
            self._drainers.append(waiter)
            await waiter
        if self._stdin_broken or self._ended:
            raise BrokenPipeError(errno.EPIPE, "the command does not read its stdin any more")

    def _wake_drainers(self) -> None:
        for waiter in self._drainers:
            if not waiter.done():
                waiter.set_result(None)
        self._drainers.clear()

    def close_stdin(self) -> None:
        self._stdin_closing = True
        self._pump()
