"""Descriptors that the connections of sandboxes may take from this process.

One budget for the process, because RLIMIT_NOFILE is the process's. Each session gets at most half
of what the other sessions leave free: one session alone cannot exhaust it, and a newcomer finds
room however much an earlier one holds.
"""

from __future__ import annotations

import resource
import threading
from typing import Final

__all__ = ["PER_CONNECTION", "Budget", "Share", "process_budget"]

PER_CONNECTION: Final = 2
"""The sandbox's side and the destination's side."""
_MAX_DESCRIPTORS: Final = 8192
_MIN_DESCRIPTORS: Final = 32
_USED_BY_OTHERS: Final = 4
"""A quarter of the limit, at least, is left to everything else in the process."""


class Budget:
    """Counts descriptors over all sessions of a process, from any thread.

    Args:
        total: how many there are; None derives it from RLIMIT_NOFILE at each use.

    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._held = 0

    @property
    def total(self) -> int:
        """Return the size of the budget."""
        return _from_limit() if self._total is None else self._total

    @property
    def held(self) -> int:
        """Return how many are taken, over all sessions."""
        return self._held

    def share(self) -> Share:
        """Return the account of one more session."""
        return Share(self)

    def take(self, count: int, *, held: int) -> bool:
        """Take ``count`` for a session that holds ``held``; False if that exceeds its share."""
        with self._lock:
            allowed = (self.total - (self._held - held)) // 2
            if held + count > allowed:
                return False
            self._held += count
            return True

    def release(self, count: int) -> None:
        """Return descriptors to the budget."""
        with self._lock:
            self._held -= count


class Share:
    """What one session holds of a budget. Used by one event loop."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int = PER_CONNECTION) -> bool:
        """Take descriptors; False if the session has used up its share."""
        if not self._budget.take(count, held=self.held):
            return False
        self.held += count
        return True

    def release(self, count: int = PER_CONNECTION) -> None:
        """Return descriptors that were taken."""
        self.held -= count
        self._budget.release(count)


def _from_limit() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    return max(_MIN_DESCRIPTORS, min(_MAX_DESCRIPTORS, soft - soft // _USED_BY_OTHERS))


process_budget: Final = Budget()
"""The budget of this process."""
