"""What a server keeps of a run until its client has it: streams by offset, events by number.

Pure book-keeping. Sent and acknowledged are two things: what was sent may be lost with the
connection, so it is kept until the client says that it has it, and sent again to a client that
comes back.
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
"""Pieces below this are joined while they wait: a program may write byte by byte."""
_PIECE_COST: Final = 64


@dataclass(slots=True)
class StreamLog:
    """The unacknowledged end of one stream."""

    acked: int = 0
    sent: int = 0
    end: int = 0
    """How many bytes there ever were."""
    closed: bool = False
    closed_sent: bool = False
    _kept: deque[bytes | bytearray] = field(default_factory=deque)
    """From ``acked`` on."""
    _waiting: deque[bytes | bytearray] = field(default_factory=deque)
    """From ``sent`` on; the same pieces, while they are whole."""

    @property
    def held(self) -> int:
        """What is kept, in bytes; a piece costs something by itself."""
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
        """Everything before ``offset`` may be forgotten."""
        if offset > self.sent:
            raise WireError(f"{offset} bytes are acknowledged, {self.sent} were sent")
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
        """A client that has ``offset`` bytes is back."""
        if not self.acked <= offset <= self.end:
            raise WireError(f"{offset} bytes cannot be there; {self.acked} to {self.end} can")
        # It was sent, if on a connection that is gone.
        self.sent = self.end
        self.ack(offset)
        self.sent = offset
        self._waiting = deque(self._kept)
        self.closed_sent = False

    def unsent(self, budget: int) -> Iterator[tuple[int, bytes]]:
        """Pieces that were not sent, with their offsets, until ``budget`` is used up."""
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
        """Nothing will come any more, and the client has everything."""
        return self.closed and self.acked == self.end


@dataclass(slots=True)
class EventLog:
    """What happened to a run, in order, until the client has it."""

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
            raise WireError(f"{number} events are acknowledged, {self.sent} were sent")
        while self.acked < number:
            self._events.popleft()
            self.acked += 1

    def rewind(self, number: int) -> None:
        if not self.acked <= number <= self.end:
            raise WireError(f"{number} events cannot be there; {self.acked} to {self.end} can")
        self.sent = max(self.sent, number)
        self.ack(number)
        self.sent = number

    def unsent(self, budget: int) -> Iterator[tuple[int, bytes]]:
        """Events that were not sent, with their numbers, until ``budget`` bytes are used up."""
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
    """The last event is in ``events``."""

    @property
    def held(self) -> int:
        return sum(stream.held for stream in self.streams.values())

    @property
    def has_more(self) -> bool:
        """Something was not sent on this connection."""
        return self.events.has_more or any(s.has_more for s in self.streams.values())

    @property
    def is_over(self) -> bool:
        """The run has ended and the client has all of it."""
        told = self.ended and self.events.acked == self.events.end
        return told and all(stream.is_over for stream in self.streams.values())

    def ack(self, known: Offsets) -> None:
        for fd, offset in ((1, known.stdout), (2, known.stderr)):
            if fd in self.streams:
                self.streams[fd].ack(offset)
        self.events.ack(known.events)

    def rewind(self, known: Offsets) -> None:
        for fd, offset in ((1, known.stdout), (2, known.stderr)):
            if fd in self.streams:
                self.streams[fd].rewind(offset)
        self.events.rewind(known.events)
