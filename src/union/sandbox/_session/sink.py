"""ProcessSink: what a transport has reported about one command so far."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from union.sandbox._core.events import Event, Exited, Failed, Started
from union.sandbox._session.streams import Collector, StreamBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._session.transport import Run

__all__ = ["ProcessSink"]


class ProcessSink:
    """Receive the events and output of one command (the Sink protocol) and wake its waiters.

    ``SandboxProcess`` owns one and hands it to the transport. All calls come from the event loop.
    """

    __slots__ = (
        "_is_done",
        "_on_done",
        "_open_streams",
        "begun",
        "buffers",
        "collected",
        "decisions",
        "done_waiters",
        "exit_waiters",
        "exited",
        "failed",
        "pid",
        "requests",
        "run",
        "runtime_ms",
    )

    def __init__(self, spec: RunSpec, on_done: Callable[[], object]) -> None:
        self.begun = time.perf_counter()
        self.runtime_ms: float | None = None
        self.run: Run | None = None
        self.pid: int | None = None
        self.exited: Exited | None = None
        self.failed: Failed | None = None
        self.decisions: list[Decision] = []
        self.requests: list[HttpRequest] = []
        self.buffers: dict[int, StreamBuffer] = {}
        self.collected: dict[int, Collector] = {}
        self.exit_waiters: list[asyncio.Future[None]] = []
        self.done_waiters: list[asyncio.Future[None]] = []
        self._on_done: Callable[[], object] | None = on_done
        self._is_done = False
        self._open_streams = 0
        for fd, mode in ((1, spec.stdout), (2, spec.stderr)):
            if mode == "devnull":
                continue
            self._open_streams += 1
            if mode == "collect":
                self.collected[fd] = Collector(spec.max_output_bytes)
            else:
                self.buffers[fd] = StreamBuffer(lambda fd=fd: self._resume(fd))  # type: ignore[misc]  # bound per fd

    # The Sink protocol.

    def event(self, event: Event) -> None:
        match event:
            case Started():
                self.pid = event.pid
            case Exited():
                self.exited = event
                self._end()
            case Failed():
                self.failed = event
                self._end()
                for fd in (1, 2):
                    self.end_of_output(fd)

    def decision(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def request(self, request: HttpRequest) -> None:
        self.requests.append(request)

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        # A piped stream goes through its buffer also while it is collected: earlier bytes may
        # still be there.
        buffer = self.buffers.get(fd)
        if buffer is not None:
            return buffer.feed(data)
        self.collected[fd].add(data)
        return True

    def end_of_output(self, fd: int) -> None:
        buffer = self.buffers.get(fd)
        if buffer is not None:
            buffer.feed_eof()
        self._open_streams -= 1
        self._check_done()

    def _end(self) -> None:
        self.runtime_ms = (time.perf_counter() - self.begun) * 1000
        _wake(self.exit_waiters)
        self._check_done()

    def _check_done(self) -> None:
        ended = self.failed is not None or (self.exited is not None and self._open_streams <= 0)
        if ended and not self._is_done:
            self._is_done = True
            self.run = None  # it refers to this object: a cycle would wait for a collection
            on_done, self._on_done = self._on_done, None  # it refers to the owner of this object
            if on_done is not None:
                on_done()
            _wake(self.done_waiters)

    def _resume(self, fd: int) -> None:
        if self.run is not None:
            self.run.resume(fd)

    # For the owner.

    def attach(self, run: Run) -> None:
        """Keep the run for its signals and paused streams, unless nothing more will follow."""
        if not self._is_done:
            self.run = run

    @property
    def has_ended(self) -> bool:
        """Whether the command has exited or failed; its streams may still be open."""
        return self.exited is not None or self.failed is not None

    def collect(self, fd: int, cap: int) -> None:
        """Collect a piped stream from now on, with what its buffer holds."""
        collector = Collector(cap)
        self.buffers[fd].redirect(collector.add)
        self.collected[fd] = collector

    def value(self, fd: int) -> bytes:
        """Return the collected output of one stream; empty if it was not collected."""
        collector = self.collected.get(fd)
        return b"" if collector is None else collector.value()

    async def until_ended(self) -> None:
        """Wait for the end of the command; its streams may still wait for their readers."""
        if not self.has_ended:
            await _wait_in(self.exit_waiters)

    async def until_done(self) -> None:
        """Wait until the command has ended and the transport has delivered all output."""
        if not self._is_done:
            await _wait_in(self.done_waiters)


async def _wait_in(waiters: list[asyncio.Future[None]]) -> None:
    """Wait for a future of one's own, so that cancelling one waiter does not affect the others."""
    waiter = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    finally:
        waiters.remove(waiter)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
