"""Descriptors that are read for the time of one command, on an event loop without epoll."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from union.sandbox._linux.reader_set import ReaderSet

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopReaders"]


class LoopReaders(ReaderSet):
    """The same as `ReaderSet`, with one entry of the event loop for each descriptor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: set[int] = set()

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call``, which must not block, whenever ``fd`` is readable."""
        self._loop.add_reader(fd, call)
        self._watched.add(fd)

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``; does nothing if it is not watched."""
        if fd in self._watched:
            self._watched.discard(fd)
            self._loop.remove_reader(fd)

    def close(self) -> None:
        """Close nothing: output may still be unread, and each descriptor is removed by its user."""
