"""The client's connection to its server: many runs share it, and it reconnects when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final, TypeVar

from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, WireError
from union.sandbox.errors import SandboxConnectionError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from union.sandbox._wire.endpoint import Endpoint
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.remote._run import RemoteRun

__all__ = ["Backoff", "ClientConnection", "unless_ended"]

_T = TypeVar("_T")
_MESSAGE: Final = 512 * 1024
_ACK_DELAY_S: Final = 0.02
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
_BRIEF_S: Final = 1.0
"""After a connection that ended sooner, reconnecting waits first, even if a run made progress."""
_LASTING_S: Final = 10.0
"""A connection that lasted this long resets the backoff, even if no run made progress."""
_FINAL: Final = frozenset({"unauthorized", "certificate", "version", "protocol"})
"""Codes of refusals that every further attempt would get again."""
_MALFORMED: Final = (WireError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a decoder; callers get a ``SandboxConnectionError`` instead."""


class Backoff:
    """Exponential backoff between attempts, for ``within_s`` seconds in total."""

    def __init__(self, within_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + within_s
        self._next = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return self._end - self._loop.time()

    async def wait(self) -> bool:
        """Sleep before the next attempt; return False if no time is left."""
        left = self.left_s
        if left <= 0:
            return False
        # Clients that lost the same server must not all reconnect at the same moment.
        await asyncio.sleep(min(left, self._next * random.uniform(0.5, 1.0)))  # noqa: S311
        self._next = min(self._next * 2, _MAX_PAUSE_S)
        return True


async def unless_ended(
    connecting: Coroutine[Any, Any, _T],
    wait_for_end: Callable[[], Awaitable[SandboxError]] | None,
) -> _T:
    """Return the result of ``connecting``, unless the server turns out to have ended before."""
    if wait_for_end is None:
        return await connecting
    attempt = asyncio.ensure_future(connecting)
    watching = asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({attempt, watching}, return_when=asyncio.FIRST_COMPLETED)
        if attempt.done() or watching.exception() is not None:
            return await attempt  # Without a watch, only the attempts themselves decide.
        raise watching.result()
    finally:
        for task in (attempt, watching):
            task.cancel()
        await asyncio.gather(attempt, watching, return_exceptions=True)


class ClientConnection:
    """The connection that carries the frames of all runs of one session.

    It reconnects when it is lost, and every run resumes. All calls must come from one event loop.
    """

    def __init__(
        self,
        stream: MessageStream,
        endpoint: Endpoint,
        *,
        connect: Callable[[], Awaitable[MessageStream]],
        release: Callable[[], Awaitable[None]],
        grace_s: float,
        wait_for_end: Callable[[], Awaitable[SandboxError]] | None = None,
        releases_when_lost: bool = False,
    ) -> None:
        self._stream: MessageStream | None = stream
        self._endpoint = endpoint
        self._connect = connect
        """Opens another message stream."""
        self._release = release
        """Closes the HTTP client that opens message streams."""
        self._grace_s = grace_s
        self._wait_for_end = wait_for_end
        """Returns when the server has ended for good, which only others know for certain."""
        self._releases_when_lost = releases_when_lost
        """Whether the caller may never close a session that is lost."""
        self._backoff: Backoff | None = None
        """The backoff of reconnecting, until a run makes progress over a new stream."""
        self.made_progress = False
        """Whether a run has made progress over the current stream."""
        self._runs: dict[int, RemoteRun] = {}
        self.ended: list[RemoteRun] = []
        """Runs that have ended in the current message, some of whose output may be missing."""
        self._outgoing: list[bytes] = []
        self._delayed_acks: dict[RemoteRun, None] = {}
        self._ack_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._close_requested = False
        self._idle = asyncio.Event()
        self.closed = asyncio.Event()
        """Set when the session has ended or was lost: nothing more will arrive."""
        self.lost: SandboxError | None = None
        """The reason why the session was lost; None unless it was."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._maintain()), loop.create_task(self._send())]

    # Runs.

    def begin(self, run: RemoteRun) -> None:
        self._runs[run.number] = run
        if self._stream is not None:
            self._outgoing.extend(run.start_frames())
            self._wake.set()

    def forget(self, run: RemoteRun) -> None:
        self._runs.pop(run.number, None)
        if not self._runs:
            self._idle.set()

    def send(self, frame: bytes) -> None:
        """Queue a frame; without a stream it is dropped, and reconnecting sends what matters."""
        if self._stream is not None:
            self._outgoing.append(frame)
            self._wake.set()

    def ack_now(self, run: RemoteRun) -> None:
        self._delayed_acks.pop(run, None)
        self.send(run.ack())

    def ack_later(self, run: RemoteRun) -> None:
        """Acknowledge with the next frame, or after a short delay: the server is not waiting."""
        if self._stream is not None:
            self._delayed_acks[run] = None
            if self._ack_timer is None:
                loop = asyncio.get_running_loop()
                self._ack_timer = loop.call_later(_ACK_DELAY_S, self._flush_acks)

    def _flush_acks(self) -> None:
        self._ack_timer = None
        self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (stream := self._stream) is not None and (self._outgoing or self._delayed_acks):
                if not await stream.send(self._next_message()):
                    break  # Receiving fails as well, and that side reconnects.

    def _next_message(self) -> list[bytes]:
        if self._delayed_acks:
            self._outgoing.extend(run.ack() for run in self._delayed_acks)
            self._delayed_acks.clear()
        size = count = 0
        for frame in self._outgoing:
            if count and size + len(frame) > _MESSAGE:
                break
            size += len(frame)
            count += 1
        message = self._outgoing[:count]
        del self._outgoing[:count]
        return message

    # Reconnecting.

    async def _maintain(self) -> None:
        why: SandboxError = SandboxConnectionError("the connection was lost", sent=True)
        loop = asyncio.get_running_loop()
        try:
            while self._stream is not None:
                begun = loop.time()
                self.made_progress = False
                why = await self._receive(self._stream)
                self._stream = None
                lasted_s = loop.time() - begun
                self._outgoing.clear()
                self._delayed_acks.clear()
                if self.closed.is_set() and not self._closing:
                    # The server has ended the session, and the caller may never use it again.
                    await self._release()
                if self._closing or self.closed.is_set():
                    break
                if self.made_progress or lasted_s >= _LASTING_S:
                    self._backoff = None
                self._stream = await unless_ended(
                    self._reconnect(at_once=lasted_s >= _BRIEF_S), self._wait_for_end
                )
        except SandboxError as exc:
            why = exc
            if self._releases_when_lost:
                await self._release()
        except asyncio.CancelledError:
            if not self._closing:
                # The event loop is shutting down and the session was not closed before.
                if self._stream is not None:
                    await self._stream.close()
                await self._release()
            raise
        finally:
            self._finish(why)

    async def _receive(self, stream: MessageStream) -> SandboxError:
        """Receive until the stream ends; return the reason."""
        try:
            async for message in stream:
                for frame in wire.decode(message):
                    self._dispatch(frame)
                while self.ended:
                    self.ended.pop().watch_remaining_output()
        except _MALFORMED as exc:
            raise SandboxConnectionError(
                f"{self._endpoint}: the server violated the protocol: {exc}",
                endpoint=str(self._endpoint),
                sent=True,
                code="protocol",
                hint="the server is faulty or hostile: do not use it",
            ) from exc
        finally:
            await stream.close()
        return SandboxConnectionError(
            f"{self._endpoint}: the connection was lost: {stream.close_reason}",
            endpoint=str(self._endpoint),
            sent=True,
        )

    def _dispatch(self, frame: wire.Frame) -> None:
        if frame.kind is Kind.CLOSED:
            self.closed.set()
        elif (run := self._runs.get(frame.run)) is not None:
            run.receive(frame)
        # Otherwise the frame is about a run that has ended here and is being acknowledged.

    async def _reconnect(self, *, at_once: bool) -> MessageStream:
        """Open a new stream, on which every run resumes.

        The first attempt after a stream with progress is made at once. All others wait, longer each
        time, and end when ``grace_s`` have passed without progress.
        """
        lost_again = self._backoff is not None
        backoff = self._backoff = self._backoff or Backoff(self._grace_s)
        if (lost_again or not at_once) and not await backoff.wait():
            raise SandboxConnectionError(
                f"{self._endpoint}: every new connection was lost at once, for {self._grace_s:g} s",
                endpoint=str(self._endpoint),
                sent=True,
                hint="check the server's log, and any proxy between it and this client",
            )
        stream = None
        while stream is None:
            try:
                stream = await self._connect()
            except SandboxConnectionError as exc:
                if exc.code in _FINAL:
                    raise
                if self._endpoint.socket is not None and not exc.sent:
                    raise  # Nothing listens on the socket: the server has ended with its session.
                if self._closing or not await backoff.wait():
                    raise
            except SandboxError as exc:
                if exc.code != "busy" or self._closing or not await backoff.wait():
                    raise
        for run in tuple(self._runs.values()):
            self._outgoing.extend(run.resume_frames())
        if self._close_requested:
            self._outgoing.append(wire.encode(Kind.CLOSE))
        self._wake.set()
        return stream

    def _finish(self, why: SandboxError) -> None:
        self._stream = None
        if not self._closing and not self.closed.is_set():
            self.lost = why
        self.closed.set()
        for run in tuple(self._runs.values()):
            if not run.has_ended:
                run.fail(str(why.args[0]), code=why.code, hint=why.hint)

    # Closing.

    async def close(self, *, within_s: float) -> bool:
        """Request the end of the session; return whether the server has confirmed it."""
        ended = self.closed.is_set() and self.lost is None
        if not ended and self._stream is not None:
            self._close_requested = True
            self.send(wire.encode(Kind.CLOSE))
            try:
                await asyncio.wait_for(self.closed.wait(), within_s)
                ended = self.lost is None
            except TimeoutError:
                ended = False
        await self.disconnect()
        return ended

    async def end_runs(self, *, within_s: float) -> None:
        """End the runs that this client has started, and no others of the session."""
        if not self._runs or self.closed.is_set():
            return
        self._idle.clear()
        for run in tuple(self._runs.values()):
            run.end("closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    async def disconnect(self) -> None:
        """Close the connection, whatever its state."""
        self._closing = True
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        if self._stream is not None:
            await self._stream.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
