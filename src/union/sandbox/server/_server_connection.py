"""The server's side of a client connection: frames of many runs, in both directions."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import Kind, WireError
from union.sandbox._wire.values import MAX_START, decode_start_body
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.server._quotas import busy
from union.sandbox.server._sessions import short_id

if TYPE_CHECKING:
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._quotas import Charge
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._server_session import ServerSession
    from union.sandbox.server._sessions import Sessions

__all__ = ["ServerConnection"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MAX_PARTIAL_STARTS: Final = 64
_MAX_REPLIES: Final = 10_000
_MAX_REFUSED_STARTS: Final = 4096
_PART_TIMEOUT_S: Final = 30.0
"""Longest time between two parts of a START."""
_FRAMES_PER_TURN: Final = 256
"""Frames that are read from one connection before others get their turn."""
_MESSAGE_BYTES: Final = 256 * 1024
"""Approximate size of one message; runs take turns by messages."""


class _PartialStart:
    """The parts of a START that have arrived."""

    __slots__ = ("charge", "data", "updated_at")

    def __init__(self, charge: Charge) -> None:
        self.data = bytearray()
        self.charge = charge
        self.updated_at = 0.0
        """Time of the last part, by the event loop's clock."""


class ServerConnection:
    """Connects the runs of one session with one client. It needs no locks: one event loop."""

    def __init__(
        self,
        stream: MessageStream,
        session: ServerSession,
        sessions: Sessions,
        *,
        grant: Grant,
        is_private: bool,
    ) -> None:
        self._is_private = is_private
        """Whether no third party can read the connection, so that it may carry secrets."""
        self._stream = stream
        self._session = session
        self._sessions = sessions
        self._metrics: Metrics = sessions.metrics
        self._grant = grant
        self._frame_budget = sessions.frames.of(grant.key)
        self._runs: dict[int, ServerRun] = {}
        self._dirty: dict[ServerRun, None] = {}
        self._replies: list[bytes] = []
        self._partial: dict[int, _PartialStart] = {}
        self._refused: OrderedDict[int, None] = OrderedDict()
        """Numbers of refused runs, parts of which may still arrive."""
        self._part_timer: asyncio.TimerHandle | None = None
        self._frames_read = 0
        """Frames that were read since other connections had their turn."""
        self._wake = asyncio.Event()
        self._ending = False
        self._close_requested = False

    async def serve(self) -> None:
        """Serve until either side closes the connection."""
        session = self._session
        session.hold()
        session.listeners.add(self)
        sender = asyncio.get_running_loop().create_task(self._send())
        try:
            await self._receive()
        except WireError as exc:
            self._metrics.bad_frames += 1
            # The text may repeat a value of the client, so it is sent to the client but not logged.
            reason = "invalid value" if isinstance(exc.__cause__, SandboxError) else str(exc)
            _LOGGER.warning(
                "connection closed: protocol error",
                extra={"session": short_id(session.name), "reason": reason},
            )
            await self._stream.close(str(exc))
        finally:
            # Nothing is awaited here: the loss of the connection cancels this task, maybe twice.
            sender.cancel()
            session.listeners.discard(self)
            if self._part_timer is not None:
                self._part_timer.cancel()
            for parts in self._partial.values():
                parts.charge.release()
            self._partial.clear()
            for run in self._runs.values():
                session.detach(run, self)
            session.release()

    # Towards the client.

    def notify(self, run: ServerRun) -> None:
        if run.is_urgent:
            self._dirty = {run: None, **self._dirty}
        else:
            self._dirty[run] = None
        self._wake.set()

    def superseded(self, run: ServerRun) -> None:
        """Release a run that another connection of its client has attached to."""
        self._runs.pop(run.number, None)
        self._dirty.pop(run, None)

    def session_closed(self) -> None:
        """Send what is left, then CLOSED."""
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
                if not await self._stream.send(pieces):
                    return  # The receiving side gets the same error and ends the connection.
            if self._ending:
                await self._stream.send((wire.encode(Kind.CLOSED),))
                try:
                    await self._stream.close()
                finally:
                    self._session.release_runs()
                return

    def _next_pieces(self) -> list[bytes]:
        frames, self._replies = self._replies, []
        size = sum(map(len, frames))
        while self._dirty and size < _MESSAGE_BYTES:
            run = next(iter(self._dirty))
            del self._dirty[run]
            for frame in run.frames(_MESSAGE_BYTES - size):
                frames.append(frame)
                size += len(frame)
            if run.has_more:
                self._dirty[run] = None
        return frames

    # From the client.

    async def _receive(self) -> None:
        async for message in self._stream:
            self._metrics.bytes_received += len(message)
            for frame in wire.decode(message):
                try:
                    self._handle_frame(frame)
                except SandboxUsageError as exc:  # An invalid value in a control frame.
                    raise WireError(str(exc)) from exc
                self._frames_read += 1
                if self._frames_read >= _FRAMES_PER_TURN:
                    await self._yield_turn()
            self._frames_read += 1
            if self._frames_read >= _FRAMES_PER_TURN:
                await self._yield_turn()

    async def _yield_turn(self) -> None:
        """Let other connections run; a key that exceeds its frame budget waits longer."""
        read, self._frames_read = self._frames_read, 0
        await asyncio.sleep(self._frame_budget.spend(read))

    def _handle_frame(self, frame: wire.Frame) -> None:
        match frame.kind:
            case Kind.START:
                self._start(frame)
            case Kind.ATTACH:
                self._attach(frame)
            case Kind.ACK:
                if (run := self._own_run(frame.run)) is not None:
                    run.ack(wire.decode_offsets(frame.payload))
                    self._forget_if_complete(run)
            case Kind.STDIN | Kind.CONTROL:
                if (run := self._own_run(frame.run)) is not None:
                    run.handle_frame(frame)
            case Kind.CLOSE:
                self._close()
            case _:
                raise WireError(f"a server does not accept {frame.kind.name} frames")

    def _own_run(self, number: int) -> ServerRun | None:
        """Return a run of this key; runs of other keys are treated as unknown."""
        run = self._session.runs.get(number)
        return run if run is not None and run.grant.key == self._grant.key else None

    def _start(self, frame: wire.Frame) -> None:
        at, last, data = wire.decode_start(frame.payload)
        number = frame.run
        if self._own_run(number) is not None:
            # The client repeats a START that the server already has; an ATTACH follows.
            return
        if at == 0:
            self._refused.pop(number, None)
            self._drop_partial(number)
        elif number in self._refused:
            return
        parts = self._partial.get(number)
        try:
            if parts is None:
                if at == 0:
                    parts = self._begin_start(number)
                else:
                    raise WireError(f"START part at {at} has no first part")
            if at != len(parts.data) or len(parts.data) + len(data) > MAX_START:
                raise WireError(
                    f"START part at {at} must be at {len(parts.data)} and end by {MAX_START}"
                )
            parts.charge.grow(len(data))
        except SandboxError as exc:
            self._refuse(number, exc)
            return
        parts.data += data
        parts.updated_at = asyncio.get_running_loop().time()
        if not last:
            return
        del self._partial[number]
        self._launch(number, bytes(parts.data), parts.charge)

    def _begin_start(self, number: int) -> _PartialStart:
        """Begin to collect the parts of a START; raise if too many others are unfinished."""
        session = self._session
        if number in session.runs:
            raise busy("another client uses this run number")
        if len(self._partial) >= _MAX_PARTIAL_STARTS:
            raise busy(f"limit of unfinished starts reached ({_MAX_PARTIAL_STARTS})")
        charge = self._sessions.bytes.charge(self._grant, session.bytes)
        parts = self._partial[number] = _PartialStart(charge)
        if self._part_timer is None:
            loop = asyncio.get_running_loop()
            self._part_timer = loop.call_later(_PART_TIMEOUT_S, self._refuse_late_starts)
        return parts

    def _refuse_late_starts(self) -> None:
        """Refuse starts whose next part is overdue."""
        self._part_timer = None
        loop = asyncio.get_running_loop()
        for number, parts in tuple(self._partial.items()):
            if loop.time() - parts.updated_at >= _PART_TIMEOUT_S:
                late = f"no part of the START frame for {_PART_TIMEOUT_S:g} s"
                self._refuse(number, SandboxUsageError(late, code="too-slow"))
        if self._partial:
            self._part_timer = loop.call_later(_PART_TIMEOUT_S / 2, self._refuse_late_starts)

    def _drop_partial(self, number: int) -> None:
        if (parts := self._partial.pop(number, None)) is not None:
            parts.charge.release()

    def _refuse(self, number: int, error: SandboxError) -> None:
        """Refuse one run and keep nothing of it; the connection and its other runs continue."""
        self._drop_partial(number)
        self._refused[number] = None
        if len(self._refused) > _MAX_REFUSED_STARTS:
            self._refused.popitem(last=False)
        self._metrics.runs_refused += 1
        event = wire.to_json({"refused": encode_error(error)})
        self._bounded_reply(wire.encode_numbered(Kind.EVENT, number, 0, event))

    def _bounded_reply(self, frame: bytes) -> None:
        if len(self._replies) >= _MAX_REPLIES:
            raise WireError(f"the client does not read: {len(self._replies)} replies are queued")
        self._reply(frame)

    def _launch(self, number: int, body: bytes, charge: Charge) -> None:
        try:
            start = decode_start_body(body)
            self._session.check_room(self._grant, needs_slot=start.kind != "cell")
        except WireError:
            charge.release()
            raise
        except SandboxError as exc:
            charge.release()
            self._refuse(number, exc)
            return
        try:
            run = self._session.start(number, start, self._grant, is_private=self._is_private)
        except SandboxError as exc:
            # The description is invalid: the client gets a refused run.
            run = self._session.refused(number, exc, self._grant)
        except BaseException:
            charge.release()
            raise
        run.over.add_done_callback(lambda _: charge.release())
        self._runs[number] = run
        run.attach(self, None)

    def _attach(self, frame: wire.Frame) -> None:
        run = self._own_run(frame.run)
        if run is None:
            if frame.run not in self._refused and frame.run not in self._partial:
                self._bounded_reply(wire.encode(Kind.UNKNOWN, frame.run))
            return
        self._runs[frame.run] = run
        run.attach(self, wire.decode_offsets(frame.payload))
        self._forget_if_complete(run)

    def _forget_if_complete(self, run: ServerRun) -> None:
        if run.log.is_over:
            self._session.forget_if_complete(run)
            self._runs.pop(run.number, None)
            self._dirty.pop(run, None)

    def _close(self) -> None:
        if not self._grant.is_full:
            raise WireError("this token does not permit closing the session")
        if self._close_requested:
            return
        self._close_requested = True
        self._sessions.close_soon(self._session, "client")
