"""The writing end of a command's stdin: queued, sent as the pipe takes it, closed after that."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Final

__all__ = ["StdinPipe"]

_CHUNK: Final = 256 * 1024
_AGAIN_S: Final = 0.02


class StdinPipe:
    """Owns a non-blocking descriptor until it is closed or the command is over."""

    def __init__(self, fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = fd
        self._queue = bytearray()
        self._closing = False
        self._broken = False
        self._waiters: list[asyncio.Future[None]] = []

    def feed(self, data: bytes) -> None:
        """Queues bytes; what the command does not take any more is dropped."""
        if self._fd is None or self._broken:
            return
        idle = not self._queue
        self._queue += data
        if idle:
            self._write()

    async def drain(self) -> None:
        """Returns when the pipe took what was queued; BrokenPipeError if nobody will read it."""
        if self._queue and not self._broken:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "the command does not read its stdin any more")

    def close(self) -> None:
        """End of file for the command, after what was queued."""
        self._closing = True
        if not self._queue:
            self.drop()

    def drop(self, *, broken: bool = False) -> None:
        """Closes now; what was not taken is lost, and whoever waits for it is told."""
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
            pass  # full again: the loop tells when there is room
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
            # The user's epoll watches, or memory, are used up: input must not be cut short.
            self._loop.call_later(_AGAIN_S, self._write)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
