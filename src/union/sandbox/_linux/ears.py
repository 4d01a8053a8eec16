"""Descriptors that are listened to for the time of one command.

The event loop knows one descriptor for each session, which is ready when any of the session's is.
To add and remove one of those is a system call and a dictionary entry; the loop would make and
drop handles and keys for it, three times for every command.
"""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ears"]

_MOST_AT_ONCE: Final = 64


class Ears:
    """Calls back when there is something to read; whoever adds a descriptor removes it again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Callable[[], None]] = {}
        self._is_kept = True
        self._open()

    def _open(self) -> None:
        self._ready = select.epoll()
        self._loop.add_reader(self._ready.fileno(), self._hear)

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Has ``call`` called for as long as ``fd`` has something to say. It must not block."""
        if fd not in self._calls:
            if self._ready.closed:
                self._open()
            self._ready.register(fd, select.EPOLLIN)
        self._calls[fd] = call

    def remove(self, fd: int) -> None:
        """Does nothing for one that is not listened to."""
        if self._calls.pop(fd, None) is not None:
            self._ready.unregister(fd)
            self._let_go()

    def _hear(self) -> None:
        for fd, _ in self._ready.poll(0, _MOST_AT_ONCE):
            # One that was called before may have removed it, or put another in its place.
            if (call := self._calls.get(fd)) is not None:
                call()

    def close(self) -> None:
        """The session is over. Output that nobody has read yet may still be listened to."""
        self._is_kept = False
        self._let_go()

    def _let_go(self) -> None:
        if not (self._is_kept or self._calls or self._ready.closed):
            self._loop.remove_reader(self._ready.fileno())
            self._ready.close()
