"""The output of processes that outlive their command: it is read slowly, and discarded.

A closed pipe would end such a process with SIGPIPE at its next line.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.terminal import read_some

if TYPE_CHECKING:
    from union.sandbox._linux.reader_set import ReaderSet

__all__ = ["LeftOutput"]

MAX_PIPES: Final = 256
"""Pipes that are kept open; the oldest is closed for one more."""
_CHUNK: Final = 64 * 1024
_PAUSE_S: Final = 0.05
"""Pause after each read, so that a process that writes for ever costs the host little."""


class LeftOutput:
    """Reads and discards, until the far ends are closed."""

    def __init__(self, readers: ReaderSet) -> None:
        self._loop = asyncio.get_running_loop()
        self._readers = readers
        self._pipes: dict[int, asyncio.TimerHandle | None] = {}
        """Near ends, oldest first, each with the end of its pause."""
        self._is_closed = False

    def add(self, near: int) -> None:
        """Take over the near end of a pipe."""
        try:
            is_held = bool(read_some(near, _CHUNK))
        except BlockingIOError:
            is_held = True
        if not is_held or self._is_closed:
            os.close(near)
            return
        if len(self._pipes) >= MAX_PIPES:
            self._close(next(iter(self._pipes)))
        self._pipes[near] = None
        self._listen(near)

    def _listen(self, near: int) -> None:
        self._pipes[near] = None
        try:
            self._readers.add(near, functools.partial(self._on_readable, near))
        except OSError:
            self._close(near)
            raise

    def _on_readable(self, near: int) -> None:
        try:
            data = read_some(near, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._close(near)
            return
        self._readers.remove(near)
        self._pipes[near] = self._loop.call_later(_PAUSE_S, self._listen, near)

    def _close(self, near: int) -> None:
        pause = self._pipes.pop(near)
        if pause is not None:
            pause.cancel()
        self._readers.remove(near)
        os.close(near)

    def close(self) -> None:
        """Close every pipe, and those that are still to come."""
        self._is_closed = True
        for near in tuple(self._pipes):
            self._close(near)
