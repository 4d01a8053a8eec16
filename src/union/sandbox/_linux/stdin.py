"""A command's stdin: a file in memory, or a pipe that is fed while the command runs."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Final

from union.sandbox._linux.descriptors import read_only_memfd

__all__ = ["StdinPipe", "open_stdin"]

_CHUNK: Final = 256 * 1024
_RETRY_S: Final = 0.02


class StdinPipe:
    """The writing end of a pipe; owns its descriptor until it is closed or the command ends."""

    def __init__(self, fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = fd
        self._queue = bytearray()
        self._closing = False
        self._broken = False
        self._waiters: list[asyncio.Future[None]] = []

    def feed(self, data: bytes) -> None:
        """Queue bytes; they are dropped if the command no longer reads."""
        if self._fd is None or self._broken:
            return
        idle = not self._queue
        self._queue += data
        if idle:
            self._write()

    async def drain(self) -> None:
        """Return when the pipe has taken what was queued.

        Raises:
            BrokenPipeError: the command no longer reads its stdin.

        """
        if self._queue and not self._broken:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "the command does not read its stdin any more")

    def close(self) -> None:
        """Close the pipe after what was queued: end of file for the command."""
        self._closing = True
        if not self._queue:
            self.drop()

    def drop(self, *, broken: bool = False) -> None:
        """Close now; queued bytes are lost, and `drain` raises."""
        if self._fd is not None:
            self._broken = broken or bool(self._queue) or not self._closing
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
            self._queue.clear()
        self._wake()

    def _write(self) -> None:
        if self._fd is None:
            return
        self._loop.remove_writer(self._fd)
        try:
            del self._queue[: os.write(self._fd, self._queue[:_CHUNK])]
        except BlockingIOError:
            pass  # full again: the loop calls when there is room
        except OSError:
            self.drop(broken=True)
            return
        if self._queue:
            self._write_later(self._fd)
            return
        self._wake()
        if self._closing:
            self.drop()

    def _write_later(self, fd: int) -> None:
        try:
            self._loop.add_writer(fd, self._write)
        except OSError:
            # The user's epoll watches, or memory, are exhausted: input must not be truncated.
            self._loop.call_later(_RETRY_S, self._write)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


def open_stdin(stdin: bytes | str | int, owner: int | None) -> tuple[int, StdinPipe | None]:
    """Return the descriptor for a command's stdin, and the pipe that feeds it, if there is one.

    Args:
        stdin: the content, a string for a pipe, or a descriptor, which is copied.
        owner: id that must own the descriptor, so that the command can reopen it.

    """
    if isinstance(stdin, bytes):
        return read_only_memfd("stdin", stdin, owner=owner), None
    if isinstance(stdin, int):
        return os.dup(stdin), None
    far, near = os.pipe()
    try:
        os.set_blocking(near, False)
        if owner is not None:
            os.fchown(far, owner, owner)
    except OSError:
        os.close(far)
        os.close(near)
        raise
    return far, StdinPipe(near)
