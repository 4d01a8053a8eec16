"""Collect the output, results and decisions of one cell, within limits, for run() and stream()."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from union.sandbox._contexts.values import CellEnd, CellOutput, CellResult

if TYPE_CHECKING:
    from union.sandbox._contexts.specs import LiveContext
    from union.sandbox._contexts.values import MimeBundle
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox.errors import SandboxError

__all__ = ["CellRecorder"]

_READ_AHEAD: Final = 1024 * 1024
"""Bytes of output and displays to hold for the reader of a stream; beyond that the cell waits."""
_NAMES: Final[dict[int, Literal["stdout", "stderr"]]] = {1: "stdout", 2: "stderr"}


class CellRecorder:
    """Receive one cell (the CellSink protocol) and build its result.

    Args:
        number: the number of the cell.
        max_output_bytes: bytes to keep of each stream.
        live: the context, to resume it when the reader of a stream has caught up.
        is_streamed: whether events are queued for a reader.

    """

    def __init__(
        self, number: int, *, max_output_bytes: int, live: LiveContext, is_streamed: bool
    ) -> None:
        self.number = number
        self._live = live
        self._limit = max_output_bytes
        self._begun = time.perf_counter()
        self._chunks: dict[int, list[bytes]] = {1: [], 2: []}
        self._sizes = {1: 0, 2: 0}
        self._truncated: dict[str, None] = {}
        self._results: list[MimeBundle] = []
        self._decisions: list[Decision] = []
        self._requests: list[HttpRequest] = []
        self._is_streamed = is_streamed
        self._events: deque[tuple[CellOutput | MimeBundle, int]] = deque()
        self._queued = 0
        self._is_paused = False
        self._arrived: asyncio.Event | None = asyncio.Event() if is_streamed else None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[CellEnd] = self._loop.create_future()
        self._waiter: asyncio.Future[None] | None = None
        self._duration_s = 0.0

    # The CellSink protocol.

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        room = self._limit - self._sizes[fd]
        if len(data) > room:
            self._truncated[_NAMES[fd]] = None
        if room > 0:
            self._chunks[fd].append(bytes(data[:room]))
            self._sizes[fd] += min(len(data), room)
        if self._is_streamed:
            return self._queue(CellOutput(_NAMES[fd], bytes(data)), len(data))
        return True

    def display(self, bundle: MimeBundle) -> bool:
        self._results.append(bundle)
        if self._is_streamed:
            return self._queue(bundle, sum(len(content) for content in bundle.data.values()))
        return True

    def decision(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def request(self, request: HttpRequest) -> None:
        self._requests.append(request)

    def done(self, end: CellEnd) -> None:
        self._duration_s = time.perf_counter() - self._begun
        if end.dropped:
            self._truncated["results"] = None
        if not self.ended.done():
            self.ended.set_result(end)
        self._wake()

    def failed(self, error: SandboxError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._arrived is not None:
            self._arrived.set()

    async def wait(self) -> None:
        """Wait until the cell has ended, and raise if it failed. One task waits.

        Cancelling this call leaves ``ended`` as it is, like ``asyncio.shield()``, which takes one
        more turn of the event loop.
        """
        if not self.ended.done():
            self._waiter = self._loop.create_future()
            await self._waiter
        self.ended.result()

    # The reader of a stream.

    def _queue(self, event: CellOutput | MimeBundle, size: int) -> bool:
        self._events.append((event, size))
        self._queued += size
        if self._arrived is not None:
            self._arrived.set()
        self._is_paused = self._queued >= _READ_AHEAD
        return not self._is_paused

    async def next_event(self) -> CellOutput | MimeBundle | None:
        """Return the next event of a streamed cell; None at its end."""
        arrived = self._arrived
        if arrived is None:
            raise RuntimeError("the cell is not streamed")
        while not self._events:
            if self.ended.done():
                return None
            arrived.clear()
            await arrived.wait()
        event, size = self._events.popleft()
        self._queued -= size
        if self._is_paused and self._queued < _READ_AHEAD:
            self._is_paused = False
            self._live.resume()
        return event

    def stop_reading(self) -> None:
        """Discard queued events; the cell no longer waits for a reader."""
        self._is_streamed = False
        self._events.clear()
        if self._is_paused:
            self._is_paused = False
            self._live.resume()

    def result(self) -> CellResult:
        """Return the outcome of a cell that has ended."""
        end = self.ended.result()
        return CellResult(
            number=self.number,
            stdout=b"".join(self._chunks[1]).decode("utf-8", "replace"),
            stderr=b"".join(self._chunks[2]).decode("utf-8", "replace"),
            results=tuple(self._results),
            error=end.error,
            exit_code=end.exit_code,
            ended=end.ended,
            reason=end.reason,
            state=end.state,
            network=tuple(self._decisions),
            requests=tuple(self._requests),
            usage=end.usage,
            duration_s=self._duration_s,
            truncated=tuple(self._truncated),
        )
