"""Prepared sandboxes that wait for a command: how many this process may hold, and for how long.

A spare is used once. It holds a process and its memory, so there is one budget for the whole host
process: the oldest spare is released first, and one that waited too long is released too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IDLE_S", "MAX_SPARES", "Budget"]

MAX_SPARES: Final = 64
"""Spares of all sessions of this process together."""
IDLE_S: Final = 20.0
"""A spare that was not used for so long is released."""


class Budget:
    """Counts the spares of all sessions, whatever loop or thread they belong to.

    A spare is released by closing its descriptors, which any thread may do: nothing reads them
    while it waits.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _spares: ClassVar[OrderedDict[int, Callable[[], None]]] = OrderedDict()
    _next: ClassVar[int] = 0

    @classmethod
    def add(cls, release: Callable[[], None]) -> int:
        """Count a spare; release the oldest if there are too many. Return its ticket."""
        with cls._lock:
            cls._next += 1
            ticket = cls._next
            cls._spares[ticket] = release
            oldest = cls._spares.popitem(last=False)[1] if len(cls._spares) > MAX_SPARES else None
        if oldest is not None:
            oldest()
        return ticket

    @classmethod
    def claim(cls, ticket: int) -> bool:
        """Remove a spare from the count; return False if it was released before."""
        with cls._lock:
            return cls._spares.pop(ticket, None) is not None

    @classmethod
    def holds(cls, ticket: int) -> bool:
        """Return whether a spare is still counted."""
        with cls._lock:
            return ticket in cls._spares

    @classmethod
    def held(cls) -> int:
        """Return the number of spares."""
        with cls._lock:
            return len(cls._spares)
