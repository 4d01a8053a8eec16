"""Blocking calls beside the event loop, in bounded pools with fair shares.

Rules of this file:

- Each kind of work has its own pool, so that slow name lookups delay no file and no close.
- One key, usually a session, gets a share of a pool, never all of it. Keys take turns.
- asyncio's default executor belongs to the caller and is not used.
- Threads start at the first call and are daemons: they never delay the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Pool",
    "PoolFullError",
    "files",
    "merging",
    "names",
    "outputs",
    "removal",
    "until_done",
    "watches",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Return only when all futures are done, even if cancelled meanwhile.

    When ``asyncio.run`` ends it cancels every task, also those that clean up, and waits for them.
    """
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            continue


class PoolFullError(OSError):
    """A pool cannot take a call: its queue for this key is full, or no thread can be started."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EAGAIN, reason)


class _Call:
    """One blocking call, and the future of the event loop that waits for it."""

    __slots__ = ("_future", "_loop", "_outcome", "_work", "key")

    def __init__(self, key: object, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.key = key
        self._work = work
        self._future = future
        self._loop = future.get_loop()
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def perform(self) -> None:
        """Run the call in this thread."""
        try:
            self._outcome = self._work(), None
        except BaseException as exc:  # noqa: BLE001 - `report` gives it to the caller
            self._outcome = None, exc

    def report(self) -> None:
        """Give the outcome to the event loop of the caller."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: no caller is left
            self._loop.call_soon_threadsafe(_settle, self._future, *self._outcome)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    if isinstance(error, StopIteration):  # a future refuses it
        error = RuntimeError("a blocking call raised StopIteration")
    future.set_exception(error)


class Pool:
    """Threads for one kind of work.

    Args:
        name: the prefix of the threads' names.
        threads: the most threads.
        share: the most threads for one key.
        queue: the most waiting calls of one key; further calls raise `PoolFullError`.
            None for no limit, where each waiting call has a task of the caller.
        abandon: whether a cancelled caller leaves at once. Otherwise it waits until the thread has
            finished the call, because the call may use files that the caller closes next.

    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        share: int,
        queue: int | None = None,
        abandon: bool = False,
    ) -> None:
        self._name = name
        self._threads = threads
        self._share = share
        self._queue = queue
        self._abandon = abandon
        self._reset()

    def _reset(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._started = 0
        self._free = 0
        """Threads without a call, but for those that were woken for one."""
        self._woken = 0
        self._running: collections.Counter[object] = collections.Counter()
        self._waiting: collections.OrderedDict[object, collections.deque[_Call]] = (
            collections.OrderedDict()
        )
        """By key; the key at the front gets the next free thread, then moves to the back."""

    async def run(
        self, key: object, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run a blocking call in a thread and return its result.

        A call that is cancelled before it started never runs.

        Raises:
            PoolFullError: the key has too many waiting calls, or no thread can be started.

        """
        work, mine = self._submit(key, functools.partial(call, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not self._withdraw(mine) and not self._abandon:
                await until_done(work)
            if work.done():
                if not work.cancelled():
                    work.exception()  # retrieved, or the loop would log it as never retrieved
            else:
                work.cancel()
            raise

    def start(self, key: object, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Queue a blocking call and return the future of its result.

        Cancelling the future does not stop the call.
        """
        return self._submit(key, call)[0]

    def _submit(self, key: object, work: Callable[[], _T]) -> tuple[asyncio.Future[_T], _Call]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        call = _Call(key, work, future)
        with self._condition:
            queue = self._waiting.get(key)
            if queue is None:
                queue = self._waiting[key] = collections.deque()
            elif self._queue is not None and len(queue) >= self._queue:
                raise PoolFullError(f"{self._name}: {len(queue)} calls are waiting already")
            queue.append(call)
            self._wake(call)
        return future, call

    def _wake(self, call: _Call) -> None:
        if self._running[call.key] >= self._share:
            return
        if self._free:
            self._free -= 1
            self._woken += 1
            self._condition.notify()
        elif self._started < self._threads:
            self._start_thread(call)

    def _start_thread(self, call: _Call) -> None:
        self._started += 1
        self._woken += 1
        thread = threading.Thread(
            target=self._serve, name=f"sandbox-{self._name}-{self._started}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:  # the limit on processes, or no memory for a stack
            self._started -= 1
            self._woken -= 1
            if not self._started:
                self._remove(call)
                raise PoolFullError(f"{self._name}: no thread can be started: {exc}") from exc

    def _serve(self) -> None:
        condition = self._condition
        while True:
            with condition:
                while (call := self._next()) is None:
                    # Others took the calls that threads were woken for.
                    self._free, self._woken = self._free + self._woken, 0
                    condition.wait()
                if self._woken:
                    self._woken -= 1
                else:
                    self._free -= 1
            call.perform()
            with condition:
                self._free += 1
                self._running[call.key] -= 1
                if not self._running[call.key]:
                    del self._running[call.key]
            call.report()  # last: the caller's next call finds this thread free

    def _next(self) -> _Call | None:
        """Take the next call of a key that has not used up its share."""
        for key, queue in self._waiting.items():
            if self._running[key] < self._share:
                call = queue.popleft()
                self._running[key] += 1
                if queue:
                    self._waiting.move_to_end(key)
                else:
                    del self._waiting[key]
                return call
        return None

    def _withdraw(self, call: _Call) -> bool:
        """Take back a call that has not started; False if it has."""
        with self._condition:
            return self._remove(call)

    def _remove(self, call: _Call) -> bool:
        queue = self._waiting.get(call.key, ())
        if call not in queue:
            return False
        self._waiting[call.key].remove(call)
        if not self._waiting[call.key]:
            del self._waiting[call.key]
        return True


files: Final = Pool("files", threads=32, share=4)
"""File work of sessions; the key is the session's tree."""
names: Final = Pool("names", threads=32, share=4, queue=256, abandon=True)
"""Name lookups; the key is the session. A lookup cannot be interrupted, only abandoned."""
removal: Final = Pool("removal", threads=8, share=2)
"""Removal of work dirs, and of those that an earlier process left behind."""
merging: Final = Pool("merging", threads=2, share=1)
"""Merging layers of checkpoints; the key is the session's merger."""
outputs: Final = Pool("outputs", threads=32, share=4)
"""Writes to the caller's own standard output and error, which may block; the key is the command."""

watches: Final = Pool("watches", threads=2, share=1)
"""Looking at the processes of commands that run for long; the key is the session."""


def _after_fork() -> None:
    # The child has none of the threads, and a lock may have been held at the moment of the fork.
    for pool in (files, merging, names, removal, outputs, watches):
        pool._reset()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)
