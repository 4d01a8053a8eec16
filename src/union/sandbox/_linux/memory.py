"""Memory limits where there is no control group: the tree's private memory is looked at often.

An address-space limit is no substitute: it breaks programs that map much and use little, and does
not add up over processes. What this misses between two looks is the price of having no group.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryWatch", "tree_memory"]

_EVERY_S: Final = 0.03
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES: Final = 4096


def tree_memory(first: int) -> int:
    """Bytes of private memory of a process and all its descendants."""
    total, waiting = 0, [first]
    for _ in range(_MOST_PROCESSES):
        if not waiting:
            break
        pid = waiting.pop()
        try:
            pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
            total += (int(pages[1]) - int(pages[2])) * _PAGE
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
                waiting.extend(map(int, children.split()))
        except OSError:
            continue  # it ended while we looked
    return total


class MemoryWatch:
    """Calls ``on_exceeded`` once when a tree holds more than it may."""

    def __init__(self, first: int, limit: int, on_exceeded: Callable[[], None]) -> None:
        self._first = first
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._loop = asyncio.get_running_loop()
        self.exceeded = False
        self.peak = 0
        self._timer = self._loop.call_later(_EVERY_S, self._look)

    def _look(self) -> None:
        used = tree_memory(self._first)
        self.peak = max(self.peak, used)
        if used > self._limit:
            self.exceeded = True
            self._on_exceeded()
            return
        self._timer = self._loop.call_later(_EVERY_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()
