"""Descriptors that are read for the time of one command.

The event loop watches one epoll descriptor for each session, which is ready when any of the
session's descriptors is. Adding one to it is a system call and a dictionary entry; adding it to the
loop would create and drop handles and keys, three times for every command.
"""

from __future__ import annotations

import asyncio
import errno
import select
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReaderSet"]

_MAX_EVENTS: Final = 64
_POLL_S: Final = 0.02
_EXHAUSTED: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""The user's epoll watches (fs.epoll.max_user_watches), memory or descriptors are exhausted,
possibly by another program: a command that already runs must still be read."""


class ReaderSet:
    """Calls back when a descriptor is readable; the caller of `add` must also call `remove`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Callable[[], None]] = {}
        self._is_kept = True
        self._unwatched: set[int] = set()
        """Descriptors without an epoll watch; they are polled until one is available."""
        self._polling: asyncio.TimerHandle | None = None
        self._open()

    def _open(self) -> None:
        ready = select.epoll()
        try:
            self._loop.add_reader(ready.fileno(), self._on_ready)
        except BaseException:
            ready.close()
            raise
        self._ready = ready

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call``, which must not block, whenever ``fd`` is readable.

        If no epoll watch is available, the descriptor is polled, so that a command that was sent
        always has a reader.
        """
        if fd not in self._calls:
            try:
                self._watch(fd)
            except OSError as exc:
                if exc.errno not in _EXHAUSTED:
                    raise
                self._unwatched.add(fd)
                self._poll_later()
        self._calls[fd] = call

    def _watch(self, fd: int) -> None:
        if self._ready.closed:
            self._open()
        self._ready.register(fd, select.EPOLLIN)

    def _poll_later(self) -> None:
        if self._polling is None:
            self._polling = self._loop.call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._polling = None
        readable = select.poll()
        for fd in tuple(self._unwatched):
            try:
                self._watch(fd)
            except OSError as exc:
                if exc.errno not in _EXHAUSTED:
                    raise
                readable.register(fd, select.POLLIN)
            else:
                self._unwatched.discard(fd)
        if self._unwatched:
            self._poll_later()
        for fd, _ in readable.poll(0):
            if fd in self._unwatched and (call := self._calls.get(fd)) is not None:
                call()

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``; does nothing if it is not watched."""
        if self._calls.pop(fd, None) is None:
            return
        if fd in self._unwatched:
            self._unwatched.discard(fd)
        else:
            self._ready.unregister(fd)
        self._close_if_unused()

    def _on_ready(self) -> None:
        for fd, _ in self._ready.poll(0, _MAX_EVENTS):
            # An earlier callback may have removed it, or replaced it.
            if (call := self._calls.get(fd)) is not None:
                call()

    def close(self) -> None:
        """Close the set once its last descriptor is removed; output may still be unread."""
        self._is_kept = False
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not (self._is_kept or self._calls or self._ready.closed):
            self._loop.remove_reader(self._ready.fileno())
            self._ready.close()
