"""Keep sandboxes with the caller's user id from using up what the kernel counts for that id.

The counters are epoll watches and descriptors in flight (`_linux/in_flight.py`).

Rules of this file:

- A command that ends within the first interval is never looked at, and costs nothing.
- A session that holds more epoll watches than its budget loses the command that holds most of it.
- Watches can be hidden from counting, in messages or in threads, and no budget limits descriptors
  in flight. So the guard also tries whether the caller has any left. If not, commands of all
  sessions are ended, the most suspect first: by what they hold or may hide, then by the time that
  they have spent in the kernel.
- Descriptors in flight cannot be hidden from a network namespace of the command's own, so a command
  that has one and holds none is never ended for them.
- Sessions of other processes of the user have a guard of their own. In the caller's network, a
  command that visibly holds no descriptor in flight is therefore ended only if the shortage lasts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from union.sandbox._linux import epoll_watches, in_flight
from union.sandbox._linux.process_list import label_of
from union.sandbox._session import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from union.sandbox._linux.epoll_watches import Table
    from union.sandbox._linux.machine import Machine
    from union.sandbox._linux.run import LocalRun

__all__ = ["CounterGuard"]

_log = logging.getLogger("union.sandbox")
_EVERY_S, _EVERY_MORE_S = 0.25, 0.002
"""The interval, and what each session that has commands adds to it."""
_SHARE, _SUSPECT_SHARE = 30, 5
"""Looking takes at most one part in so many of a processor's time; more, if many are held."""
_MANY: Final = 16
"""This part of its budget makes a session suspect."""
_BUDGET: Final = 8
"""A session gets this part of the watches of one user."""
_SEARCH_S: Final = 0.2
_FRESH_S: Final = 2.0
"""How long the suspicion that a session has reported is compared with those of others."""
_PATIENCE_S: Final = 1.0
"""How long no other command is ended after one: what it holds is free when its processes end."""
_GRACE_S: Final = 3.0
"""How long no descriptor can be passed before commands are ended that visibly hold none."""
_TICK_S: Final = 0.01
"""The least time in the kernel: shorter ones are counted as none."""
_S_PER_WATCH: Final = 1e-7
"""Adding a watch takes longer than this in the kernel."""


_Shortage = Literal["epoll watches", "descriptors in flight", ""]
"""The counter that is used up; empty: none."""
_REASONS: Final = {
    "epoll watches": "this user has no epoll watches left",
    "descriptors in flight": "this user has too many file descriptors in flight (RLIMIT_NOFILE)",
}


class _Suspicion(NamedTuple):
    held: int
    """Watches or descriptors in flight, that it holds or may hide."""
    system_s: float
    """Time in the kernel; 0 if nothing can be hidden."""


class _Group(NamedTuple):
    """Processes that are ended together."""

    tables: list[Table]
    end: Callable[[], None]


class CounterGuard:
    """Watch the commands of one session while there are any."""

    _reports: ClassVar[dict[int, tuple[float, _Shortage, _Suspicion]]] = {}
    """The most suspect command of each session of this process, during a shortage."""
    _watching: ClassVar[set[int]] = set()
    _last_answer: ClassVar[tuple[float, _Shortage]] = (0.0, "")
    _since: ClassVar[float] = 0.0
    """When the shortage of the last answer began."""
    _last_end: ClassVar[float] = 0.0
    """When a command was ended because of a shortage."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        *,
        running: Callable[[], Iterable[LocalRun]],
        waiting: Callable[[], Iterable[LocalRun]],
        machine: Callable[[], Machine | None],
    ) -> None:
        """Watch what the functions return.

        Args:
            running: the commands and contexts of the session.
            waiting: Pythons without a command, which may have executed code of the venv.
            machine: the machine of the session, if it has one.

        """
        self._running = running
        self._waiting = waiting
        self._machine = machine
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen: set[LocalRun] = set()
        self._pids: dict[LocalRun, int] = {}
        self._count_at = 0.0
        """When watches are counted next; whether any are left is tried in between."""
        self._is_closed = False
        self.budget = epoll_watches.max_watches() // _BUDGET

    def wake(self) -> None:
        """Begin to watch, unless it has begun."""
        if self._timer is None and self.budget and not self._is_closed:
            with self._lock:
                self._watching.add(id(self))
            self._again()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._stop()

    def _again(self) -> None:
        every_s = _EVERY_S + len(self._watching) * _EVERY_MORE_S
        self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def _stop(self) -> None:
        self._timer = None
        self._pids.clear()
        with self._lock:
            self._watching.discard(id(self))
            self._reports.pop(id(self), None)

    def _look(self) -> None:
        machine = self._machine()
        now = {run for run in (*self._running(), *self._waiting()) if not run.finished.done()}
        old, self._seen = now & self._seen, now
        if not now and machine is None:
            self._stop()
            return
        loop = asyncio.get_running_loop()
        shortage = self._shortage()
        if (old or machine) and (shortage or loop.time() >= self._count_at):
            self._task = loop.create_task(self._measure(old, machine, shortage))
        else:
            self._again()

    @classmethod
    def _shortage(cls) -> _Shortage:
        """Return which counter of this user is used up; sessions share the answer for a moment."""
        now = time.monotonic()
        with cls._lock:
            at, found = cls._last_answer
            if now - at > _EVERY_S / 2:
                before, found = found, _find_shortage()
                cls._last_answer = now, found
                if found != before:
                    cls._since = now
        return found

    async def _measure(
        self, runs: set[LocalRun], machine: Machine | None, shortage: _Shortage
    ) -> None:
        loop = asyncio.get_running_loop()
        began, is_idle, share = loop.time(), False, _SHARE
        try:
            groups = await self._groups(runs, machine)
            is_idle = not groups and not self._seen
            if groups and await self._check(groups, shortage):
                share = _SUSPECT_SHARE
        except OSError as exc:  # no thread can be started, or the launcher has been stopped
            _log.warning("the kernel counters of sandboxes cannot be read: %s", exc)
        finally:
            self._task = None
            self._count_at = loop.time() + (loop.time() - began) * share
            if self._is_closed or (is_idle and not any(self._running())):
                self._stop()
            else:
                self._again()

    async def _check(self, groups: list[_Group], shortage: _Shortage) -> bool:
        """End a command if it must be; return whether the session is suspect."""
        counts = await threads.watches.run(self, _counts, groups, self.budget)
        if sum(counts) > self.budget:
            worst = max(range(len(groups)), key=counts.__getitem__)
            _log.warning(
                "a command was ended: its session holds more than %d epoll watches of this user "
                "(an eighth of fs.epoll.max_user_watches)",
                self.budget,
            )
            groups[worst].end()
            return True
        if not shortage:
            with self._lock:
                self._reports.pop(id(self), None)
            return sum(counts) > self.budget // _MANY
        found = await threads.watches.run(self, _suspicions, groups, self.budget, shortage)
        worst = max(range(len(groups)), key=found.__getitem__)
        if self._is_most_suspect(shortage, found[worst]):
            _log.warning("a command was ended: %s", _REASONS[shortage])
            groups[worst].end()
            self._note_end()
        return True

    def _note_end(self) -> None:
        with self._lock:
            self._reports.pop(id(self), None)
            CounterGuard._last_end = time.monotonic()

    def _is_most_suspect(self, shortage: _Shortage, mine: _Suspicion) -> bool:
        """Report; return whether no other session has reported more since the last time."""
        if not self._is_suspect(shortage, mine):
            return False
        now = time.monotonic()
        with self._lock:
            is_second = self._reports.get(id(self), (0.0, ""))[1] == shortage
            self._reports[id(self)] = now, shortage, mine
            fresh = [
                it
                for at, kind, it in self._reports.values()
                if now - at < _FRESH_S and kind == shortage
            ]
            is_patient = now - self._last_end < _PATIENCE_S
        return is_second and not is_patient and mine >= max(fresh)

    def _is_suspect(self, shortage: _Shortage, mine: _Suspicion) -> bool:
        if shortage == "descriptors in flight":
            is_lasting = time.monotonic() - self._since > _GRACE_S
            return mine.held > 0 or (mine.system_s > 0 and is_lasting)
        return mine.held > self.budget // _BUDGET or mine.system_s >= self.budget * _S_PER_WATCH

    async def _groups(self, runs: set[LocalRun], machine: Machine | None) -> list[_Group]:
        firsts = {run: await self._locate(run) for run in runs}
        self._pids = firsts
        if machine is None:
            trees = await threads.watches.run(self, _trees, list(firsts.values()))
            ends = [functools.partial(self._end, run) for run in firsts]
            return [_Group(*it) for it in zip(trees, ends, strict=True) if it[0]]
        if machine.is_lost:
            return []
        own = await machine.locate()
        by_label = await threads.watches.run(self, _by_label, [own, *firsts.values()], own)
        by_run = {run.sandbox.label: run for run in firsts}
        return [
            _Group(tables, functools.partial(self._end, by_run[label]))
            if label in by_run
            else _Group(tables, functools.partial(_end_left, machine, label))
            for label, tables in by_label.items()
        ]

    async def _locate(self, run: LocalRun) -> int:
        if not self._pids.get(run):
            self._pids[run] = await run.sandbox.channel.locate(run.sandbox.number)
        return self._pids[run]

    def _end(self, run: LocalRun) -> None:
        if run in self._running():
            run.end_now("limit")
        elif not run.has_ended:
            run.sandbox.kill()  # it has no command yet, and will get none


def _after_fork() -> None:
    # A lock may have been held at the moment of the fork, and no session of the parent is ours.
    CounterGuard._lock = threading.Lock()  # noqa: SLF001 - of this module
    CounterGuard._watching.clear()  # noqa: SLF001
    CounterGuard._reports.clear()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)


def _end_left(machine: Machine, label: int) -> None:
    """End processes that a command of a machine has left behind."""
    if label:
        machine.signal(label, signal.SIGKILL)
    else:
        machine.end()  # they cannot be inspected, and so not be found


def _trees(firsts: list[int]) -> list[list[Table]]:
    return [epoll_watches.descriptor_tables(first) if first else [] for first in firsts]


def _by_label(firsts: list[int], machine: int) -> dict[int, list[Table]]:
    """Return the tables of commands by label, without those of the product's own processes."""
    found: dict[int, list[Table]] = {}
    for tables in _trees(firsts):
        for table in tables:
            found.setdefault(label_of(table.pid), []).append(table)
    for pid in (os.getpid(), machine):
        found.pop(label_of(pid), None)
    return found


def _counts(groups: list[_Group], budget: int) -> list[int]:
    """Return the watches of each group; bounds, if these are low enough together."""
    bounds = [epoll_watches.bound(group.tables) for group in groups]
    if sum(bounds) <= budget:
        return bounds
    return [epoll_watches.count(group.tables, budget) for group in groups]


def _find_shortage() -> _Shortage:
    if epoll_watches.is_exhausted():
        return "epoll watches"
    return "descriptors in flight" if in_flight.is_exhausted() else ""


def _suspicions(groups: list[_Group], budget: int, shortage: _Shortage) -> list[_Suspicion]:
    until = time.monotonic() + _SEARCH_S
    found = []
    for group in groups:
        holding = epoll_watches.hidden(group.tables, until)
        if shortage == "descriptors in flight":
            unlisted = in_flight.unlisted_sockets({table.pid for table in group.tables})
            if unlisted is None:
                found.append(_Suspicion(holding.in_flight, max(holding.system_s, _TICK_S)))
            else:
                held = holding.in_flight + unlisted * in_flight.MOST_PER_MESSAGE
                found.append(_Suspicion(held, 0.0))
            continue
        watches = epoll_watches.count(group.tables, budget)
        # Each descriptor in a message may be an epoll instance with as many as a table allows.
        most = max((table.size for table in group.tables), default=0)
        found.append(_Suspicion(watches + holding.in_flight * most**2, holding.system_s))
    return found
