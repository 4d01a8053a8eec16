"""One connection of a client: frames of many runs, in both directions."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from union.sandbox._core import wire
from union.sandbox._core.wire import Kind, WireError
from union.sandbox._core.wire_values import MAX_START
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.server._sessions import short

if TYPE_CHECKING:
    from union.sandbox._session.line import Carrier
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import ServerSession, Sessions

__all__ = ["Link"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MOST_PARTIAL: Final = 64
_MOST_REPLIES: Final = 10_000
_RUNS_KEPT: Final = 4
"""Of a session, in multiples of what may run at once on the server."""
_MESSAGE: Final = 256 * 1024
"""About how much goes into one message: many runs take turns."""


class Link:
    """Carries the runs of one session to one client. All in the event loop: no locks."""

    def __init__(
        self,
        carrier: Carrier,
        session: ServerSession,
        sessions: Sessions,
        *,
        may_close: bool,
    ) -> None:
        self._carrier = carrier
        self._session = session
        self._sessions = sessions
        self._metrics: Metrics = sessions.metrics
        self._may_close = may_close
        self._runs: dict[int, ServerRun] = {}
        self._dirty: dict[ServerRun, None] = {}
        self._replies: list[bytes] = []
        self._parts: dict[int, bytearray] = {}
        self._wake = asyncio.Event()
        self._ending = False
        self._asked_to_close = False

    async def serve(self) -> None:
        """Returns when the connection has ended, by either side."""
        session = self._session
        session.hold()
        session.listeners.add(self)
        sender = asyncio.get_running_loop().create_task(self._send())
        try:
            await self._receive()
        except WireError as exc:
            self._metrics.bad_frames += 1
            _LOGGER.warning(
                "connection refused", extra={"session": short(session.name), "why": str(exc)}
            )
            await self._carrier.close(str(exc))
        finally:
            # Nothing is awaited here: a client that is gone cancels this, and again.
            sender.cancel()
            session.listeners.discard(self)
            self._sessions.buffers.held -= sum(map(len, self._parts.values()))
            for run in self._runs.values():
                session.detach(run, self)
            session.release()

    # Towards the client.

    def notify(self, run: ServerRun) -> None:
        self._dirty[run] = None
        self._wake.set()

    def session_closed(self) -> None:
        """Says the rest, then that it was the last."""
        self._ending = True
        self._wake.set()

    def _reply(self, frame: bytes) -> None:
        self._replies.append(frame)
        self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty or self._replies:
                pieces = self._next_pieces()
                self._metrics.bytes_sent += sum(map(len, pieces))
                if not await self._carrier.send(pieces):
                    return  # the receiving side finds out as well, and sees to it
            if self._ending:
                await self._carrier.send((wire.encode(Kind.CLOSED),))
                try:
                    await self._carrier.close()
                finally:
                    self._session.let_go()
                return

    def _next_pieces(self) -> list[bytes]:
        frames, self._replies = self._replies, []
        size = sum(map(len, frames))
        while self._dirty and size < _MESSAGE:
            run = next(iter(self._dirty))
            del self._dirty[run]
            for frame in run.frames(_MESSAGE - size):
                frames.append(frame)
                size += len(frame)
            if run.has_more:
                self._dirty[run] = None
        return frames

    # From the client.

    async def _receive(self) -> None:
        async for message in self._carrier:
            self._metrics.bytes_received += len(message)
            for frame in wire.decode(message):
                try:
                    self._take(frame)
                except SandboxUsageError as exc:  # a value that a client of ours does not send
                    raise WireError(str(exc)) from exc

    def _take(self, frame: wire.Frame) -> None:
        match frame.kind:
            case Kind.START:
                self._start(frame)
            case Kind.ATTACH:
                self._attach(frame)
            case Kind.ACK:
                if (run := self._session.runs.get(frame.run)) is not None:
                    run.ack(wire.parse_offsets(frame.payload))
                    self._forget_if_over(run)
            case Kind.STDIN | Kind.CONTROL:
                if (run := self._session.runs.get(frame.run)) is not None:
                    run.take(frame)
            case Kind.CLOSE:
                self._close()
            case _:
                raise WireError(f"{frame.kind.name} is not for a server")

    def _start(self, frame: wire.Frame) -> None:
        at, last, data = wire.parse_part(frame.payload)
        if frame.run in self._session.runs:
            # A retry of what has been started already: an ATTACH follows.
            return
        parts = self._parts.setdefault(frame.run, bytearray())
        buffers = self._sessions.buffers
        if at == 0:
            buffers.held -= len(parts)
            parts.clear()
        if at != len(parts) or len(parts) + len(data) > MAX_START:
            raise WireError(f"a start with a part at {at}, which is not its place")
        if len(self._parts) > _MOST_PARTIAL:
            raise WireError("more starts at once than are accepted")
        parts += data
        buffers.held += len(data)
        if not last:
            return
        buffers.held -= len(parts)
        del self._parts[frame.run]
        self._launch(frame.run, bytes(parts))

    def _launch(self, number: int, body: bytes) -> None:
        if len(self._session.runs) >= _RUNS_KEPT * self._sessions.config.max_runs:
            raise WireError("more runs than are kept, and the client takes no notice of their ends")
        try:
            run = self._session.start(number, body)
        except SandboxError as exc:
            # Found wrong before it was a run: told as one that was refused.
            run = self._session.refused(number, exc)
        self._runs[number] = run
        run.attach(self, None)

    def _attach(self, frame: wire.Frame) -> None:
        run = self._session.runs.get(frame.run)
        if run is None:
            if len(self._replies) >= _MOST_REPLIES:
                raise WireError("more questions than answers are taken")
            self._reply(wire.encode(Kind.UNKNOWN, frame.run))
            return
        self._runs[frame.run] = run
        run.attach(self, wire.parse_offsets(frame.payload))
        self._forget_if_over(run)

    def _forget_if_over(self, run: ServerRun) -> None:
        if run.log.is_over:
            self._session.forget_if_over(run)
            self._runs.pop(run.number, None)
            self._dirty.pop(run, None)

    def _close(self) -> None:
        if not self._may_close:
            raise WireError("this client may not end the session")
        if self._asked_to_close:
            return
        self._asked_to_close = True
        self._sessions.close_soon(self._session, "client")
