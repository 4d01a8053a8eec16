"""The connection of a session: one for many runs; comes back when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Final

from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, WireError
from union.sandbox.errors import SandboxConnectionError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._wire.endpoint import Endpoint
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.remote._run import RemoteRun

__all__ = ["Link", "pauses"]

_MESSAGE: Final = 512 * 1024
_LATER_S: Final = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_BRIEF_S: Final = 1.0
"""A connection that ended sooner is not made again without a pause, even if it was useful."""
_LASTING_S: Final = 10.0
"""A connection that lasted so long has proved itself, also if nothing was to be sent."""
_FINAL: Final = frozenset({"unauthorized", "certificate", "version", "protocol"})
"""Codes of refusals that another attempt would meet again."""
_MALFORMED: Final = (WireError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a decoder: none of them may reach a caller as it is."""


def pauses(within_s: float) -> _Pauses:
    """How long to wait before each new attempt; ends when ``within_s`` have passed."""
    return _Pauses(within_s)


class _Pauses:
    def __init__(self, within_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + within_s
        self._next = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return self._end - self._loop.time()

    async def wait(self) -> bool:
        """False: there is no time left."""
        left = self.left_s
        if left <= 0:
            return False
        # Many clients that lost the same server must not come back at the same moment.
        await asyncio.sleep(min(left, self._next * random.uniform(0.5, 1.0)))  # noqa: S311
        self._next = min(self._next * 2, _LONGEST_PAUSE_S)
        return True


class Link:
    """Carries frames for the runs of one session. All in one event loop."""

    def __init__(
        self,
        carrier: MessageStream,
        endpoint: Endpoint,
        *,
        connect: Callable[[], Awaitable[MessageStream]],
        let_go: Callable[[], Awaitable[None]],
        grace_s: float,
    ) -> None:
        self._carrier: MessageStream | None = carrier
        self._endpoint = endpoint
        self._connect = connect
        """Makes another connection."""
        self._let_go = let_go
        """Frees what connections are made with."""
        self._grace_s = grace_s
        self._attempts: _Pauses | None = None
        """The pauses of reconnecting, until a connection has proved useful."""
        self.is_useful = False
        """Whether a run got any further over this connection."""
        self._runs: dict[int, RemoteRun] = {}
        self._out: list[bytes] = []
        self._late: dict[RemoteRun, None] = {}
        self._late_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._asks_to_close = False
        self._idle = asyncio.Event()
        self.closed = asyncio.Event()
        """The session is over, or was given up: nothing more will come."""
        self.lost: SandboxError | None = None
        """Why it was given up."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep()), loop.create_task(self._send())]

    # Runs.

    def begin(self, run: RemoteRun) -> None:
        self._runs[run.number] = run
        if self._carrier is not None:
            for frame in run.first_frames():
                self.send(frame)

    def forget(self, run: RemoteRun) -> None:
        self._runs.pop(run.number, None)
        if not self._runs:
            self._idle.set()

    def send(self, frame: bytes) -> None:
        """Sends now; without a connection, what counts is said again when there is one."""
        if self._carrier is not None:
            self._out.append(frame)
            self._wake.set()

    def ack_now(self, run: RemoteRun) -> None:
        self._late.pop(run, None)
        self.send(run.ack())

    def ack_later(self, run: RemoteRun) -> None:
        """Nobody waits for it: goes along with the next frame, or a little later."""
        if self._carrier is not None:
            self._late[run] = None
            if self._late_timer is None:
                loop = asyncio.get_running_loop()
                self._late_timer = loop.call_later(_LATER_S, self._flush_late)

    def _flush_late(self) -> None:
        self._late_timer = None
        self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (carrier := self._carrier) is not None and (self._out or self._late):
                if not await carrier.send(self._next_message()):
                    break  # the reading side finds out as well, and sees to it

    def _next_message(self) -> list[bytes]:
        self._out.extend(run.ack() for run in self._late)
        self._late.clear()
        size = count = 0
        for frame in self._out:
            if count and size + len(frame) > _MESSAGE:
                break
            size += len(frame)
            count += 1
        message = self._out[:count]
        del self._out[:count]
        return message

    # Keeping it up.

    async def _keep(self) -> None:
        why: SandboxError = SandboxConnectionError("the connection was lost", sent=True)
        loop = asyncio.get_running_loop()
        try:
            while self._carrier is not None:
                begun = loop.time()
                self.is_useful = False
                why = await self._receive(self._carrier)
                self._carrier = None
                lasted_s = loop.time() - begun
                self._out.clear()
                self._late.clear()
                if self.closed.is_set() and not self._closing:
                    # The server has ended the session: whoever has it may never ask again.
                    await self._let_go()
                if self._closing or self.closed.is_set():
                    break
                if self.is_useful or lasted_s >= _LASTING_S:
                    self._attempts = None
                self._carrier = await self._reconnect(at_once=lasted_s >= _BRIEF_S)
        except SandboxError as exc:
            why = exc
        except asyncio.CancelledError:
            if not self._closing:
                # The loop is going down, and nobody has closed the session first.
                if self._carrier is not None:
                    await self._carrier.close()
                await self._let_go()
            raise
        finally:
            self._give_up(why)

    async def _receive(self, carrier: MessageStream) -> SandboxError:
        """Reads until the connection ends; the reason."""
        try:
            async for message in carrier:
                for frame in wire.decode(message):
                    self._take(frame)
        except _MALFORMED as exc:
            raise SandboxConnectionError(
                f"{self._endpoint}: the server sent what is not of this protocol: {exc}",
                endpoint=str(self._endpoint),
                sent=True,
                code="protocol",
                hint="the server is faulty or hostile: do not use it",
            ) from exc
        finally:
            await carrier.close()
        return SandboxConnectionError(
            f"{self._endpoint}: the connection was lost: {carrier.close_reason}",
            endpoint=str(self._endpoint),
            sent=True,
        )

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind is Kind.CLOSED:
            self.closed.set()
        elif (run := self._runs.get(frame.run)) is not None:
            run.receive(frame)
        # Else: about a run that has ended here; its acknowledgement is on the way.

    async def _reconnect(self, *, at_once: bool) -> MessageStream:
        """A new connection, on which every run goes on where it was.

        The first attempt after a useful connection is made at once. All others wait, longer each
        time, and end when ``grace_s`` have passed without a useful connection.
        """
        lost_again = self._attempts is not None
        attempts = self._attempts = self._attempts or pauses(self._grace_s)
        if (lost_again or not at_once) and not await attempts.wait():
            raise SandboxConnectionError(
                f"{self._endpoint}: every new connection was lost at once, for {self._grace_s:g} s",
                endpoint=str(self._endpoint),
                sent=True,
                hint="look at the server's log, and at what stands between it and this client",
            )
        carrier = None
        while carrier is None:
            try:
                carrier = await self._connect()
            except SandboxConnectionError as exc:
                if exc.code in _FINAL:
                    raise
                if self._endpoint.socket is not None and not exc.sent:
                    raise  # nothing listens there any more: the server is gone, and the session
                if self._closing or not await attempts.wait():
                    raise
            except SandboxError as exc:
                if exc.code != "busy" or self._closing or not await attempts.wait():
                    raise
        for run in tuple(self._runs.values()):
            self._out.extend(run.opening_frames())
        if self._asks_to_close:
            self._out.append(wire.encode(Kind.CLOSE))
        self._wake.set()
        return carrier

    def _give_up(self, why: SandboxError) -> None:
        self._carrier = None
        if not self._closing and not self.closed.is_set():
            self.lost = why
        self.closed.set()
        for run in tuple(self._runs.values()):
            if not run.has_ended:
                run.fail(str(why.args[0]), code=why.code, hint=why.hint)

    # The end.

    async def close(self, *, within_s: float) -> bool:
        """Asks the server to end the session and waits until it has; False: it may not know."""
        ended = self.closed.is_set() and self.lost is None
        if not ended and self._carrier is not None:
            self._asks_to_close = True
            self.send(wire.encode(Kind.CLOSE))
            try:
                await asyncio.wait_for(self.closed.wait(), within_s)
                ended = self.lost is None
            except TimeoutError:
                ended = False
        await self.leave()
        return ended

    async def end_runs(self, *, within_s: float) -> None:
        """Ends what this client has started, and nothing else of the session."""
        if not self._runs or self.closed.is_set():
            return
        self._idle.clear()
        for run in tuple(self._runs.values()):
            run.end("closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    async def leave(self) -> None:
        """Lets the connection go, whatever state it is in."""
        self._closing = True
        if self._late_timer is not None:
            self._late_timer.cancel()
        if self._carrier is not None:
            await self._carrier.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
