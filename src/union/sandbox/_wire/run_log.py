"""The output and events of a run that its client has not acknowledged yet.

Pure book-keeping, without input or output: streams by offset, events by number. Data that was sent
may be lost with its connection, so the log keeps it until the client acknowledges it and sends it
again to a client that reconnects.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from union.sandbox._wire.frames import MAX_CHUNK, Offsets, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EventLog", "RunLog", "StreamLog"]

_SMALL: Final = 16 * 1024
"""Pieces below this size are joined while they wait, because a program may write byte by byte."""
_PIECE_COST: Final = 64


@dataclass(slots=True)
class StreamLog:
    """The unacknowledged end of one stream."""

    acked: int = 0
    sent: int = 0
    end: int = 0
    """How many bytes the stream has had so far."""
    closed: bool = False
    closed_sent: bool = False
    _kept: deque[bytes | bytearray] = field(default_factory=deque)
    """From ``acked`` on."""
    _waiting: deque[bytes | bytearray] = field(default_factory=deque)
    """From ``sent`` on; the same objects as in ``_kept``, while they are whole."""

    @property
    def held(self) -> int:
        """The memory in use, in bytes, with a fixed cost for each piece."""
        return self.end - self.acked + _PIECE_COST * len(self._kept)

    def append(self, data: bytes) -> None:
        self.end += len(data)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, bytearray) and last is self._kept[-1] and len(last) < _SMALL:
            last += data
            return
        piece = bytearray(data) if len(data) < _SMALL else data
        self._kept.append(piece)
        self._waiting.append(piece)

    def ack(self, offset: int) -> None:
        """Drop everything before ``offset``."""
        if offset > self.sent:
            raise WireError(f"{offset} bytes are acknowledged, but only {self.sent} were sent")
        while self.acked < offset:
            first = self._kept[0]
            here = offset - self.acked
            if here < len(first):
                self._kept[0] = first[here:]
                self.acked = offset
            else:
                self._kept.popleft()
                self.acked += len(first)

    def rewind(self, offset: int) -> None:
        """Send again from ``offset`` on, to a client that has reconnected."""
        if not self.acked <= offset <= self.end:
            raise WireError(f"offset must be {self.acked} to {self.end}, got {offset}")
        # An earlier connection may have sent more than ``sent`` shows after a rewind.
        self.sent = self.end
        self.ack(offset)
        self.sent = offset
        self._waiting = deque(self._kept)
        self.closed_sent = False

    def unsent(self, budget: int) -> Iterator[tuple[int, bytes]]:
        """Yield the unsent pieces with their offsets, until ``budget`` bytes are used up."""
        while self._waiting and budget > 0:
            piece = self._waiting.popleft()
            if len(piece) > MAX_CHUNK:
                self._waiting.appendleft(piece[MAX_CHUNK:])
                piece = piece[:MAX_CHUNK]
            offset = self.sent
            self.sent += len(piece)
            budget -= len(piece)
            yield offset, bytes(piece)

    @property
    def has_more(self) -> bool:
        return self.sent < self.end or (self.closed and not self.closed_sent)

    @property
    def is_over(self) -> bool:
        """Whether the stream is closed and the client has all of it."""
        return self.closed and self.acked == self.end


@dataclass(slots=True)
class EventLog:
    """The events of a run, in order, that the client has not acknowledged yet."""

    acked: int = 0
    sent: int = 0
    _events: deque[bytes] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.acked + len(self._events)

    def append(self, event: bytes) -> None:
        self._events.append(event)

    def ack(self, number: int) -> None:
        if number > self.sent:
            raise WireError(f"{number} events are acknowledged, but only {self.sent} were sent")
        while self.acked < number:
            self._events.popleft()
            self.acked += 1

    def rewind(self, number: int) -> None:
        if not self.acked <= number <= self.end:
            raise WireError(f"event number must be {self.acked} to {self.end}, got {number}")
        self.sent = max(self.sent, number)
        self.ack(number)
        self.sent = number

    def unsent(self, budget: int) -> Iterator[tuple[int, bytes]]:
        """Yield the unsent events with their numbers, until ``budget`` bytes are used up."""
        for event in tuple(itertools.islice(self._events, self.sent - self.acked, None)):
            if budget <= 0:
                return
            self.sent += 1
            budget -= len(event)
            yield self.sent - 1, event

    @property
    def has_more(self) -> bool:
        return self.sent < self.end


@dataclass(slots=True)
class RunLog:
    """Both streams of one run, and its events."""

    streams: dict[int, StreamLog]
    events: EventLog = field(default_factory=EventLog)
    ended: bool = False
    """Whether ``events`` has the last event."""

    @property
    def held(self) -> int:
        return sum(stream.held for stream in self.streams.values())

    @property
    def has_more(self) -> bool:
        """Whether anything is unsent on this connection."""
        return self.events.has_more or any(s.has_more for s in self.streams.values())

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and the client has all of it."""
        has_events = self.ended and self.events.acked == self.events.end
        return has_events and all(stream.is_over for stream in self.streams.values())

    def ack(self, known: Offsets) -> None:
        for fd, offset in known.streams:
            if fd in self.streams:
                self.streams[fd].ack(offset)
        self.events.ack(known.events)

    def rewind(self, known: Offsets) -> None:
        for fd, offset in known.streams:
            if fd in self.streams:
                self.streams[fd].rewind(offset)
        self.events.rewind(known.events)
