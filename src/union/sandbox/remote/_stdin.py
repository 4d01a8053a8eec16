"""The stdin of a command on a server: sent within a window, as the command reads it."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from typing import TYPE_CHECKING

from union.sandbox._wire.frames import MAX_CHUNK, STDIN_WINDOW, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._wire.frames import Taken

__all__ = ["RemoteStdin"]


class RemoteStdin:
    """The bytes that wait for the server, and the callers that wait for these bytes.

    Args:
        send: sends bytes that fit into one frame.
        send_eof: sends end-of-file.

    """

    def __init__(self, send: Callable[[bytes], None], send_eof: Callable[[], None]) -> None:
        self._send = send
        self._send_eof = send_eof
        self._waiting: deque[bytes] = deque()
        self._queued = 0
        self._sent = 0
        self._taken = 0
        self._closing = False
        self._broken = False
        """Whether the command has closed its stdin."""
        self._ended = False
        self._drainers: list[asyncio.Future[None]] = []

    def feed(self, data: bytes) -> None:
        """Queue bytes, and send what fits into the window."""
        if self._broken or self._ended:
            return
        self._queued += len(data)
        for at in range(0, len(data), MAX_CHUNK):
            self._waiting.append(data[at : at + MAX_CHUNK])
        self._pump()

    def close(self) -> None:
        """Send end-of-file after the queued bytes."""
        self._closing = True
        self._pump()

    def _pump(self) -> None:
        while self._waiting and self._sent - self._taken < STDIN_WINDOW:
            data = self._waiting.popleft()
            self._sent += len(data)
            self._send(data)
        if self._closing and not self._waiting:
            self._closing = False
            self._send_eof()

    def on_taken(self, taken: Taken) -> None:
        """Continue after the server has confirmed bytes, or that no more are read."""
        if taken.stdin > self._sent:
            raise WireError("TAKEN confirms more than was sent")
        self._taken = max(self._taken, taken.stdin)
        if taken.broken:
            self._broken = True
            self._waiting.clear()
        self._pump()
        if self._broken or self._taken >= self._queued:
            self._wake()

    async def drain(self) -> None:
        """Wait until all queued bytes are confirmed; BrokenPipeError if they are not read."""
        while not self._broken and not self._ended and self._taken < self._queued:
            waiter = asyncio.get_running_loop().create_future()
            self._drainers.append(waiter)
            await waiter
        if self._broken or self._ended:
            raise BrokenPipeError(errno.EPIPE, "the command no longer reads its stdin")

    def end(self) -> None:
        """Wake the callers of ``drain``: the command has ended."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._drainers:
            if not waiter.done():
                waiter.set_result(None)
        self._drainers.clear()
