"""A command on a server: delivers output and events to the sink in order and exactly once."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.events import Failed
from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import decode_error
from union.sandbox._wire.frames import Kind, Offsets, WireError
from union.sandbox._wire.values import decode_event, decode_isolation
from union.sandbox.remote._output import OutputStream
from union.sandbox.remote._stdin import RemoteStdin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.events import Exited, Started
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._session.transport import Sink
    from union.sandbox.errors import SandboxError
    from union.sandbox.remote._admission import Slot
    from union.sandbox.remote._connection import ClientConnection

__all__ = ["RemoteRun"]

DEADLINE_GRACE_S: Final = 15.0
"""How long after its timeout the server may take to report the end of a command."""
REMAINING_OUTPUT_S: Final = 30.0
"""How long the output of a command that has ended may make no progress."""
MAX_EVENTS: Final = 10_100
"""A run has at most 10,000 network decisions, and few other events."""
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""All events of one run together."""


class RemoteRun:
    """A command in flight (the Run protocol), over a connection that may break and resume."""

    max_events = MAX_EVENTS

    def __init__(
        self,
        number: int,
        body: bytes,
        sink: Sink,
        *,
        connection: ClientConnection,
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
        self._connection = connection
        self._streams = {fd: OutputStream() for fd in fds}
        self._undelivered = len(fds)
        """Streams whose end was not passed to the sink."""
        self._slot = slot
        self._was_started = False
        self._limit_s = None if timeout_s is None else timeout_s + DEADLINE_GRACE_S
        self._deadline: asyncio.TimerHandle | None = None
        self._events = 0
        self._event_bytes = 0
        self._ended = False
        self._sent = 0
        self._unconfirmed: deque[tuple[int, bytes]] = deque()
        """Upstream frames that the server has not confirmed."""
        self._stdin: RemoteStdin | None = None

    # The deadline.

    def watch(self) -> None:
        """Start the deadline: a server that does not report the end in time is given up."""
        if self._limit_s is None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._limit_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self.end("timeout")
        limit_s = (self._limit_s or 0.0) - DEADLINE_GRACE_S
        self.fail(
            f"the server did not report the end of a command with timeout_s={limit_s:g} within "
            f"{DEADLINE_GRACE_S:g} s of its timeout",
            code="no-answer",
            hint="the server is overloaded, stuck or hostile; the command may still run there",
        )

    def watch_remaining_output(self) -> None:
        """Require steady progress of the output that remains after the command has ended."""
        if self._is_over:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        loop = asyncio.get_running_loop()
        received = sum(stream.received for stream in self._streams.values())
        self._deadline = loop.call_later(REMAINING_OUTPUT_S, self._check_remaining_output, received)

    def _check_remaining_output(self, before: int) -> None:
        received = sum(stream.received for stream in self._streams.values())
        if received != before or any(stream.paused for stream in self._streams.values()):
            self.watch_remaining_output()
            return
        self.fail(
            "the command has ended, and no more of its output was received for "
            f"{REMAINING_OUTPUT_S:g} s",
            code="no-answer",
        )

    def _release(self) -> None:
        """Release the deadline, the connection and the slot: the run has ended on this side."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._connection.forget(self)
        if self._slot is not None:
            self._slot.release()

    # The connection.

    def resume_frames(self) -> Iterator[bytes]:
        """Yield the frames that resume this run on a server that may or may not have it."""
        if not self.started.done():
            yield from wire.encode_start(self.number, self._body)
        known = {fd: stream.received for fd, stream in self._streams.items()}
        yield wire.encode_offsets(Kind.ATTACH, self.number, Offsets.of(known, self._events))
        for _, frame in self._unconfirmed:
            yield frame

    def start_frames(self) -> list[bytes]:
        """Return the frames that start this run on a connection that works."""
        return wire.encode_start(self.number, self._body)

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
                self.fail("the server no longer has the command", code="run-lost")
            case _:
                raise WireError(f"a server must not send {frame.kind.name}")

    def fail(self, reason: str, *, code: str = "connection", hint: str = "") -> None:
        """Fail the run: its end, or part of its output, will never arrive."""
        if self.has_ended:
            return
        self._ended = True
        self._give_up_output()
        self._sink.event(Failed("transport", reason, code, hint))
        self._resolve_started()
        self._end_stdin()
        self._release()

    @property
    def has_ended(self) -> bool:
        """Whether its end and all its output have arrived; the exit may overtake output."""
        return self._ended and all(
            stream.closed or stream.end_delivered for stream in self._streams.values()
        )

    @property
    def _is_over(self) -> bool:
        """Whether the run has ended and all its output was delivered."""
        return self._ended and not self._undelivered

    # Output.

    def _give_up_output(self) -> None:
        """Deliver no more output: the end of the run stands for the ends of its streams."""
        self._undelivered = 0
        for stream in self._streams.values():
            stream.end_delivered = True

    def _stream(self, fd: int) -> OutputStream:
        try:
            return self._streams[fd]
        except KeyError:
            raise WireError(f"output of stream {fd}, which was not requested") from None

    def _on_output(self, fd: int, offset: int, data: memoryview) -> None:
        stream = self._stream(fd)
        if offset > stream.received:
            raise WireError(f"output at offset {offset}, but {stream.received} bytes were received")
        data = data[stream.received - offset :] if offset < stream.received else data
        if not data or stream.closed:
            return
        stream.received += len(data)
        self._connection.made_progress = True
        # A small view would keep its whole message in memory, so it is copied.
        kept = data if 2 * len(data) > len(data.obj) else bytes(data)  # type: ignore[arg-type]  # of bytes
        if stream.paused:
            stream.hold(kept)
        else:
            self._deliver(fd, stream, kept)
            self._ack_if_due(stream)

    def _deliver(self, fd: int, stream: OutputStream, data: bytes | memoryview) -> None:
        stream.unacked_frames += 1
        if stream.end_delivered:
            return
        if self._sink.output(fd, data):
            stream.delivered += len(data)
        else:
            stream.paused = True

    def _on_end_of_output(self, fd: int, offset: int) -> None:
        stream = self._stream(fd)
        if offset != stream.received:
            raise WireError(f"stream ends at {offset}, but {stream.received} bytes were received")
        stream.closed = True
        self._end_if_delivered(fd, stream)

    def _end_if_delivered(self, fd: int, stream: OutputStream) -> None:
        if stream.closed and not stream.waiting and not stream.end_delivered:
            stream.end_delivered = True
            self._undelivered -= 1
            stream.delivered = stream.received
            self._sink.end_of_output(fd)
            self._finish_if_over()

    def resume(self, fd: int) -> None:
        # Deferred, because the caller is still processing earlier output.
        if self._streams[fd].paused:
            asyncio.get_running_loop().call_soon(self._continue, fd)

    def _continue(self, fd: int) -> None:
        stream = self._streams[fd]
        if not stream.paused:
            return
        stream.paused = False
        stream.delivered = stream.received - stream.held
        while stream.waiting and not stream.paused:
            self._deliver(fd, stream, stream.take())
        self._ack_if_due(stream)
        self._end_if_delivered(fd, stream)

    def _ack_if_due(self, stream: OutputStream) -> None:
        if stream.wants_ack:
            self._connection.ack_now(self)
        elif stream.delivered > stream.acked:
            self._connection.ack_later(self)

    def ack(self) -> bytes:
        """Return an ACK frame for everything that was delivered."""
        for stream in self._streams.values():
            stream.acked = stream.delivered
            stream.unacked_frames = 0
        known = {fd: stream.delivered for fd, stream in self._streams.items()}
        return wire.encode_offsets(Kind.ACK, self.number, Offsets.of(known, self._events))

    # Events.

    def _on_event(self, number: int, data: bytes) -> None:
        if number > self._events:
            raise WireError(f"expected event {self._events}, got {number}")
        if number < self._events:
            return
        self._events += 1
        self._event_bytes += len(data)
        if self._events > self.max_events or self._event_bytes > MAX_EVENT_BYTES:
            raise WireError(f"{self._events} events of {self._event_bytes} bytes for one run")
        self._connection.made_progress = True
        name, value = decode_event(data)
        if self._ended:
            # The end is the last event: a second one would change the reported outcome.
            raise WireError(f"event {name} after the end of a run")
        if self._was_started and name in {"started", "refused"}:
            raise WireError(f"event {name} after the start of a run")
        match name:
            case "started":
                self._on_started(*value)
            case "decision":
                self._sink.decision(value)
            case "request":
                self._sink.request(value)
            case "refused":
                self._refused(decode_error(value))
            case "context":
                self._on_change(value)
            case _:
                self._on_end(name, value)

    def _on_change(self, fields: dict[str, Any]) -> None:
        """Receive an event of a context; a command has none."""
        raise WireError(f"an event of a context with {len(fields)} fields for a command")

    def _on_started(self, event: Started, isolation: object) -> None:
        if isinstance(isolation, dict):
            self.isolation = decode_isolation(isolation)
        self._was_started = True
        if self._slot is not None:
            self._slot.started()
        self.watch()
        self._sink.event(event)
        self._resolve_started()

    def _on_end(self, name: str, event: Exited | Failed) -> None:
        self._ended = True
        if name == "failed":
            self._give_up_output()
        self._sink.event(event)
        self._resolve_started()
        self._end_stdin()
        self._finish_if_over()
        if not self._is_over:
            # The rest of its output is usually in the same message, so no timer is needed.
            self._connection.ended.append(self)

    def _end_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.end()

    def _refused(self, error: SandboxError) -> None:
        self._ended = True
        self._give_up_output()
        if not self.started.done():
            self.started.set_exception(error)
        self._end_stdin()
        self._finish_if_over()

    def _resolve_started(self) -> None:
        self._body = b""
        if not self.started.done():
            self.started.set_result(None)

    def _finish_if_over(self) -> None:
        """Release the run once everything has arrived and was delivered."""
        if self._is_over:
            for stream in self._streams.values():
                stream.delivered = stream.received
            self._connection.ack_later(self)
            self._release()

    # Upstream.

    def _send(self, kind: Kind, data: bytes) -> None:
        self._sent += 1
        frame = wire.encode_numbered(kind, self.number, self._sent, data)
        self._unconfirmed.append((self._sent, frame))
        self._connection.send(frame)

    def _control(self, **payload: Any) -> None:
        if not self._ended:
            self._send(Kind.CONTROL, wire.to_json(payload))

    def signal(self, signum: int) -> None:
        self._control(op="signal", signum=int(signum))

    def end(self, cause: str) -> None:
        self._control(op="end", cause=cause)

    def resize(self, rows: int, cols: int) -> None:
        self._control(op="resize", rows=rows, cols=cols)

    def _on_taken(self, taken: wire.Taken) -> None:
        if taken.number > self._sent:
            raise WireError("TAKEN confirms more than was sent")
        while self._unconfirmed and self._unconfirmed[0][0] <= taken.number:
            self._unconfirmed.popleft()
        if self._stdin is not None or taken.stdin or taken.broken:
            self._opened_stdin().on_taken(taken)

    # Standard input.

    def _opened_stdin(self) -> RemoteStdin:
        """Return the stdin; most commands have none, so the first use creates it."""
        if self._stdin is None:
            send = functools.partial(self._send, Kind.STDIN)
            self._stdin = RemoteStdin(send, functools.partial(self._control, op="eof"))
            if self._ended:
                self._stdin.end()
        return self._stdin

    def feed_stdin(self, data: bytes) -> None:
        self._opened_stdin().feed(data)

    async def drain_stdin(self) -> None:
        await self._opened_stdin().drain()

    def close_stdin(self) -> None:
        self._opened_stdin().close()
