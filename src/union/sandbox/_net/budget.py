"""The file descriptors of this process that the connections of sandboxes may use.

RLIMIT_NOFILE applies to the process, so there is one budget per process. Each session gets at most
half of the descriptors that the other sessions leave free: one session alone cannot exhaust the
budget, and a new session finds room however many descriptors an earlier one holds.
"""

from __future__ import annotations

import resource
import threading
from typing import Final

__all__ = ["PER_CONNECTION", "Budget", "Share", "process_budget"]

PER_CONNECTION: Final = 2
"""File descriptors of one connection: the client socket and the server socket."""
_MAX_DESCRIPTORS: Final = 8192
_MIN_DESCRIPTORS: Final = 32
_RESERVED_DIVISOR: Final = 4
"""At least a quarter of RLIMIT_NOFILE stays available to the rest of the process."""


class Budget:
    """Count file descriptors over all sessions of a process. Safe to use from any thread.

    Args:
        total: size of the budget. Default None: derived from RLIMIT_NOFILE at each use.

    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._held = 0

    @property
    def total(self) -> int:
        """Return the size of the budget."""
        return _budget_from_rlimit() if self._total is None else self._total

    @property
    def held(self) -> int:
        """Return the number of descriptors in use over all sessions."""
        return self._held

    def share(self) -> Share:
        """Return the share of a new session."""
        return Share(self)

    def acquire(self, count: int, *, held: int) -> bool:
        """Reserve ``count`` for a session that holds ``held``; False if that exceeds its share."""
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
    """The part of a budget that one session holds. Used by one event loop."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def acquire(self, count: int = PER_CONNECTION) -> bool:
        """Reserve descriptors; False if the session has used up its share."""
        if not self._budget.acquire(count, held=self.held):
            return False
        self.held += count
        return True

    def release(self, count: int = PER_CONNECTION) -> None:
        """Return descriptors of this session to the budget."""
        self.held -= count
        self._budget.release(count)


def _budget_from_rlimit() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_DESCRIPTORS
    return max(_MIN_DESCRIPTORS, min(_MAX_DESCRIPTORS, soft - soft // _RESERVED_DIVISOR))


process_budget: Final = Budget()
"""The budget of this process."""
