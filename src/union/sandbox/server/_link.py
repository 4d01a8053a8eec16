"""One connection of a client: frames of many runs, in both directions."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from union.sandbox._wire import frames as wire
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import Kind, WireError
from union.sandbox._wire.values import MAX_START
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.server._sessions import short
from union.sandbox.server._shares import busy

if TYPE_CHECKING:
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import ServerSession, Sessions
    from union.sandbox.server._shares import Charge

__all__ = ["Link"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MOST_PARTIAL: Final = 64
_MOST_REPLIES: Final = 10_000
_MAX_REFUSED: Final = 4096
_PART_S: Final = 30.0
"""How long a client may take between two parts of a start."""
_TURN: Final = 256
"""Frames that are read from one connection before others have their turn."""
_MESSAGE: Final = 256 * 1024
"""About how much goes into one message: many runs take turns."""


class _Unfinished:
    """The parts of a start that have arrived."""

    __slots__ = ("at", "charge", "data")

    def __init__(self, charge: Charge) -> None:
        self.data = bytearray()
        self.charge = charge
        self.at = 0.0
        """When the last one arrived."""


class Link:
    """Carries the runs of one session to one client. All in the event loop: no locks."""

    def __init__(
        self,
        carrier: MessageStream,
        session: ServerSession,
        sessions: Sessions,
        *,
        grant: Grant,
    ) -> None:
        self._carrier = carrier
        self._session = session
        self._sessions = sessions
        self._metrics: Metrics = sessions.metrics
        self._grant = grant
        self._frames = sessions.frames.of(grant.key)
        self._runs: dict[int, ServerRun] = {}
        self._dirty: dict[ServerRun, None] = {}
        self._replies: list[bytes] = []
        self._parts: dict[int, _Unfinished] = {}
        self._refused: OrderedDict[int, None] = OrderedDict()
        """Starts that were refused while parts of them were still on their way."""
        self._look: asyncio.TimerHandle | None = None
        self._read = 0
        """Frames since other connections had their turn."""
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
            # The text may repeat a value of the client: it goes there, and not into the log.
            why = "a value that cannot be" if isinstance(exc.__cause__, SandboxError) else str(exc)
            _LOGGER.warning(
                "connection refused", extra={"session": short(session.name), "why": why}
            )
            await self._carrier.close(str(exc))
        finally:
            # Nothing is awaited here: a client that is gone cancels this, and again.
            sender.cancel()
            session.listeners.discard(self)
            if self._look is not None:
                self._look.cancel()
            for parts in self._parts.values():
                parts.charge.release()
            self._parts.clear()
            for run in self._runs.values():
                session.detach(run, self)
            session.release()

    # Towards the client.

    def notify(self, run: ServerRun) -> None:
        self._dirty[run] = None
        self._wake.set()

    def superseded(self, run: ServerRun) -> None:
        """The client has another connection, and the run goes on there."""
        self._runs.pop(run.number, None)
        self._dirty.pop(run, None)

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
                self._read += 1
                if self._read >= _TURN:
                    await self._let_others()
            self._read += 1
            if self._read >= _TURN:
                await self._let_others()

    async def _let_others(self) -> None:
        """Other connections have their turn; a key that sends too many frames waits longer."""
        read, self._read = self._read, 0
        await asyncio.sleep(self._frames.spend(read))

    def _take(self, frame: wire.Frame) -> None:
        match frame.kind:
            case Kind.START:
                self._start(frame)
            case Kind.ATTACH:
                self._attach(frame)
            case Kind.ACK:
                if (run := self._known(frame.run)) is not None:
                    run.ack(wire.decode_offsets(frame.payload))
                    self._forget_if_over(run)
            case Kind.STDIN | Kind.CONTROL:
                if (run := self._known(frame.run)) is not None:
                    run.take(frame)
            case Kind.CLOSE:
                self._close()
            case _:
                raise WireError(f"{frame.kind.name} is not for a server")

    def _known(self, number: int) -> ServerRun | None:
        """A run of this client. Those of other keys do not exist for it."""
        run = self._session.runs.get(number)
        return run if run is not None and run.grant.key == self._grant.key else None

    def _start(self, frame: wire.Frame) -> None:
        at, last, data = wire.decode_start(frame.payload)
        number = frame.run
        if self._known(number) is not None:
            # A retry of what has been started already: an ATTACH follows.
            return
        if at == 0:
            self._refused.pop(number, None)
            self._drop_parts(number)
        elif number in self._refused:
            return
        parts = self._parts.get(number)
        try:
            if parts is None:
                if at == 0:
                    parts = self._begin(number)
                else:
                    raise WireError(f"a start with a part at {at}, which is not its place")
            if at != len(parts.data) or len(parts.data) + len(data) > MAX_START:
                raise WireError(f"a start with a part at {at}, which is not its place")
            parts.charge.grow(len(data))
        except SandboxError as exc:
            self._refuse(number, exc)
            return
        parts.data += data
        parts.at = asyncio.get_running_loop().time()
        if not last:
            return
        del self._parts[number]
        self._launch(number, bytes(parts.data), parts.charge)

    def _begin(self, number: int) -> _Unfinished:
        """A description begins to arrive; raises if too many others have not ended."""
        session = self._session
        if number in session.runs:
            raise busy("the number of the run is taken by another client")
        if len(self._parts) >= _MOST_PARTIAL:
            raise busy(f"limit of unfinished starts reached ({_MOST_PARTIAL})")
        charge = self._sessions.bytes.charge(self._grant, session.bytes)
        parts = self._parts[number] = _Unfinished(charge)
        if self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(_PART_S, self._drop_late)
        return parts

    def _drop_late(self) -> None:
        """Refuse starts of which no part has come for long."""
        self._look = None
        loop = asyncio.get_running_loop()
        for number, parts in tuple(self._parts.items()):
            if loop.time() - parts.at >= _PART_S:
                late = f"no part of the start has arrived for {_PART_S:g} s"
                self._refuse(number, SandboxUsageError(late, code="too-slow"))
        if self._parts:
            self._look = loop.call_later(_PART_S / 2, self._drop_late)

    def _drop_parts(self, number: int) -> None:
        if (parts := self._parts.pop(number, None)) is not None:
            parts.charge.release()

    def _refuse(self, number: int, error: SandboxError) -> None:
        """Refuse one run and keep nothing of it; the connection and its other runs go on."""
        self._drop_parts(number)
        self._refused[number] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        self._metrics.runs_refused += 1
        event = wire.to_json({"refused": encode_error(error)})
        self._answer(wire.encode_numbered(Kind.EVENT, number, 0, event))

    def _answer(self, frame: bytes) -> None:
        if len(self._replies) >= _MOST_REPLIES:
            raise WireError(f"{len(self._replies)} answers wait for a client that does not read")
        self._reply(frame)

    def _launch(self, number: int, body: bytes, charge: Charge) -> None:
        try:
            self._session.check_room(self._grant)
        except SandboxError as exc:
            charge.release()
            self._refuse(number, exc)
            return
        try:
            run = self._session.start(number, body, self._grant)
        except SandboxError as exc:
            # Found wrong before it was a run: reported as one that was refused.
            run = self._session.refused(number, exc, self._grant)
        except BaseException:
            charge.release()
            raise
        run.over.add_done_callback(lambda _: charge.release())
        self._runs[number] = run
        run.attach(self, None)

    def _attach(self, frame: wire.Frame) -> None:
        run = self._known(frame.run)
        if run is None:
            if frame.run not in self._refused and frame.run not in self._parts:
                self._answer(wire.encode(Kind.UNKNOWN, frame.run))
            return
        self._runs[frame.run] = run
        run.attach(self, wire.decode_offsets(frame.payload))
        self._forget_if_over(run)

    def _forget_if_over(self, run: ServerRun) -> None:
        if run.log.is_over:
            self._session.forget_if_over(run)
            self._runs.pop(run.number, None)
            self._dirty.pop(run, None)

    def _close(self) -> None:
        if not self._grant.is_full:
            raise WireError("this client may not end the session")
        if self._asked_to_close:
            return
        self._asked_to_close = True
        self._sessions.close_soon(self._session, "client")
