"""Limits how many runs of a session are sent to its server at once.

A server refuses a run with the code ``busy`` when it has no room. The refused run waits here, in
order, and is sent again when a run of this session has ended, or after a pause that doubles. Only
the first in the queue tries, so that a thousand waiting calls cost the server as much as one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Final

__all__ = ["Admission", "Slot"]

MAX_STARTING: Final = 64
"""Runs that were sent, and that the server has neither started nor refused yet."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0


class Slot:
    """The slot of one run that was sent; released once, however the run ends."""

    __slots__ = ("_admission", "_state")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._state = "starting"

    def started(self) -> None:
        """Record that the server has started the run."""
        if self._state == "starting":
            self._state = "started"
            self._admission.note_start()

    def release(self) -> None:
        """Return the slot: the run has ended, or was refused."""
        if self._state != "left":
            was_started, self._state = self._state == "started", "left"
            self._admission.note_end(was_started=was_started)


class Admission:
    """The admission queue of one session. All calls must come from one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._starting = 0
        self._active = 0
        self._limit = float("inf")
        """How many runs the server has room for, as far as this client has observed."""
        self._pause_s = _FIRST_PAUSE_S
        self._probe: asyncio.TimerHandle | None = None
        self._queue: deque[asyncio.Future[None]] = deque()
        self._progress = self._loop.time()
        """When the server last started or ended a run of this session."""
        self._closed = False

    def enter_now(self) -> Slot | None:
        """Return a slot if a run may be sent at once; None if it must wait: ``enter()``."""
        if self._queue:
            return None
        if self._active == 0:
            self._progress = self._loop.time()
        if self._starting >= MAX_STARTING or self._active >= self._limit:
            return None
        self._reserve()
        return Slot(self)

    async def enter(self, max_wait_s: float) -> Slot | None:
        """Wait until a run may be sent; return its slot.

        Return None if the server has made room for no run of this session for ``max_wait_s``.
        """
        return self.enter_now() or await self._wait(max_wait_s, first=False)

    async def enter_again(self, max_wait_s: float) -> Slot | None:
        """Like ``enter()``, for a run that the server refused as ``busy``; it stays the first."""
        self._limit = max(1.0, float(self._active - self._starting))
        return await self._wait(max_wait_s, first=True)

    def note_start(self) -> None:
        """Record that the server has started a run."""
        self._starting -= 1
        self._limit += 1 / max(self._limit, 1.0)
        self._pause_s = _FIRST_PAUSE_S
        self._progress = self._loop.time()
        if self._queue:
            self._admit()

    def note_end(self, *, was_started: bool) -> None:
        """Record that a run has ended or was never started; the next may take its slot."""
        self._active -= 1
        if was_started:
            self._progress = self._loop.time()
            if self._queue:
                self._admit()
        else:
            self._starting -= 1

    def close(self) -> None:
        """Wake all waiting calls, because the session has ended."""
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
        while self._queue:
            self._grant()

    async def _wait(self, max_wait_s: float, *, first: bool) -> Slot | None:
        if self._closed:
            self._reserve()
            return Slot(self)
        turn: asyncio.Future[None] = self._loop.create_future()
        if first:
            self._queue.appendleft(turn)
        else:
            self._queue.append(turn)
        self._arm()
        try:
            while not turn.done():
                left_s = self._progress + max_wait_s - self._loop.time()
                if left_s <= 0:
                    self._queue.remove(turn)
                    return None
                await asyncio.wait({turn}, timeout=left_s)
        except asyncio.CancelledError:
            if turn.done():
                self.note_end(was_started=False)
                self._admit()
            else:
                self._queue.remove(turn)
            raise
        return Slot(self)

    def _reserve(self) -> None:
        self._starting += 1
        self._active += 1

    def _grant(self) -> None:
        self._reserve()
        self._queue.popleft().set_result(None)

    def _admit(self) -> None:
        while self._queue and self._starting < MAX_STARTING and self._active + 1 <= self._limit:
            self._grant()

    def _arm(self) -> None:
        if self._probe is None:
            # Clients of a full server must not all try again at the same moment.
            pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
            self._probe = self._loop.call_later(pause_s, self._try)

    def _try(self) -> None:
        """Let the first in the queue try, whether or not there seems to be room."""
        self._probe = None
        if not self._queue:
            return
        if self._starting < MAX_STARTING:
            self._pause_s = min(self._pause_s * 2, _MAX_PAUSE_S)
            self._grant()
        if self._queue:
            self._arm()
