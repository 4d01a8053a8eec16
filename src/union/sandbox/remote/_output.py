"""One output stream of a command on a server, on its way to the sink."""

from __future__ import annotations

from collections import deque
from typing import Final

from union.sandbox._wire.frames import WINDOW, WireError

__all__ = ["OutputStream"]

_ACK_EVERY: Final = WINDOW // 4
"""Each ACK costs both sides a system call and a wake-up, so they are rare while output flows."""
_ACK_FRAMES: Final = 256
_SMALL: Final = 2048
_MAX_WAITING: Final = 2 * WINDOW
"""The most bytes of an unread stream that are accepted; an honest server stops at the window."""


class OutputStream:
    """The offsets of one stream, and the output that waits while the sink has paused it."""

    def __init__(self) -> None:
        self.received = 0
        self.delivered = 0
        """How many bytes the sink has accepted."""
        self.acked = 0
        self.unacked_frames = 0
        self.paused = False
        self.closed = False
        self.end_delivered = False
        """Whether the sink was notified of the end."""
        self.waiting: deque[memoryview | bytes] = deque()
        self.held = 0
        """How many bytes wait."""

    @property
    def wants_ack(self) -> bool:
        return self.delivered - self.acked >= _ACK_EVERY or (
            self.unacked_frames >= _ACK_FRAMES and self.delivered > self.acked
        )

    def hold(self, data: memoryview | bytes) -> None:
        """Keep the output that arrives while the sink has paused the stream."""
        if len(data) < _SMALL and self.waiting and len(self.waiting[-1]) < _SMALL:
            # Bytes that arrive one by one must not cost an object each.
            self.waiting[-1] = bytes(self.waiting[-1]) + data
        else:
            self.waiting.append(data)
        self.held += len(data)
        if self.held > _MAX_WAITING:
            raise WireError(f"{self.held} bytes of output beyond the window")

    def take(self) -> memoryview | bytes:
        """Return the first output that waits."""
        data = self.waiting.popleft()
        self.held -= len(data)
        return data
