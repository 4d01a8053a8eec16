"""Bounded buffers between a command and its reader, and splitting into lines."""

from __future__ import annotations

import asyncio
import codecs
import functools
from collections import deque
from typing import TYPE_CHECKING, Final

from union.sandbox.constants import UNREAD_STREAM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Collector", "StreamBuffer"]

_MAX_LINE_END_BYTES: Final = len(b"\r\n")
_SMALL_BYTES: Final = 2048
_MANY_CHUNKS: Final = 64
_READ_AHEAD: Final = 1024 * 1024
"""Bytes to buffer of a stream; beyond that the command is paused until the stream is read."""


class StreamBuffer:
    """A bounded buffer between a command and the reader of one piped stream.

    ``feed`` returns whether there is room for more; when there is room again, ``on_room`` is called
    once. The limit is low while this stream is being read, and high while only the other stream
    is, so that reading one stream to its end and then the other does not block the command.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._start = 0
        """The number of bytes of the first chunk already returned as lines."""
        self._partial: list[bytes] = []
        """The beginning of an incomplete line; kept if its reader is cancelled."""
        self._size = 0
        self._limit = _READ_AHEAD
        self._full = False
        self._ended = False
        self._on_room = on_room
        self._waiter: asyncio.Future[None] | None = None
        self._into: Callable[[bytes | memoryview], None] | None = None

    @functools.cached_property
    def _line_decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes | memoryview) -> bool:
        if self._into is not None:
            self._into(data)
            return True
        chunks = self._chunks
        if (
            len(data) < _SMALL_BYTES
            and len(chunks) > _MANY_CHUNKS
            and len(chunks[-1]) < _SMALL_BYTES
        ):
            # Single bytes must not cost an object each.
            chunks[-1] = bytes(chunks[-1]) + data
        else:
            chunks.append(data)
        self._size += len(data)
        self._wake()
        self._full = self._size >= self._limit
        return not self._full

    def feed_eof(self) -> None:
        self._ended = True
        self._wake()

    def redirect(self, into: Callable[[bytes | memoryview], None]) -> None:
        """Pass the buffered bytes, and all that follow, to ``into`` without a bound."""
        self._check_alone()
        self._into = into
        if self._partial:
            into(self._take_partial())
        while self._chunks:
            into(self._take())

    def widen(self) -> None:
        """Raise the limit: the caller waits for the other stream or for the end of the command."""
        self._limit = UNREAD_STREAM_BYTES
        self._make_room()

    def narrow(self) -> None:
        """Lower the limit: this stream is being read."""
        self._limit = _READ_AHEAD

    def _take_partial(self) -> bytes:
        taken = b"".join(self._partial)
        self._partial.clear()
        return taken

    async def read(self) -> bytes | memoryview:
        """Return the next chunk; empty at the end of the stream."""
        if self._partial:
            return self._take_partial()
        if not self._chunks:
            await self._more()
        return self._take() if self._chunks else b""

    async def read_line(self, max_bytes: int) -> str | None:
        """Return the next line, decoded, without its line end; None at the end of the stream.

        A line longer than ``max_bytes`` is returned in pieces, never split inside a character.
        Bytes that were not returned stay for the next reader, of lines or of chunks.
        """
        while True:
            if not self._chunks and not await self._more():
                rest = self._take_partial()
                return self._line_decoder.decode(rest, final=True) if rest else None
            room = max_bytes - sum(map(len, self._partial))
            # The line end may follow directly after the longest line.
            chunk, start = self._first(), self._start
            stop = min(len(chunk), start + room + _MAX_LINE_END_BYTES)
            end = chunk.find(b"\n", start, stop)
            if end >= 0 and end - chunk.endswith(b"\r", start, end) <= start + room:
                self._partial.append(chunk[start:end])
                self._advance(end + 1)
                line = self._take_partial().removesuffix(b"\r")
                text = self._line_decoder.decode(line, final=True)
                self._line_decoder.reset()
                return text
            if stop <= start + room:
                self._partial.append(chunk[start:stop])
                self._advance(stop)
            elif stop == start + room + _MAX_LINE_END_BYTES or not await self._join_next():
                self._partial.append(chunk[start : start + room])
                self._advance(start + room)
                return self._line_decoder.decode(self._take_partial())

    async def _join_next(self) -> bool:
        """Join the first two chunks; return False if there is no second."""
        if len(self._chunks) == 1 and not await self._more(beyond=1):
            return False
        first = self._first()[self._start :]
        self._chunks.popleft()
        self._start = 0
        self._chunks[0] = first + self._first()
        return True

    def _first(self) -> bytes:
        """Convert the first chunk to bytes and return it."""
        first = self._chunks[0] = bytes(self._chunks[0])
        return first

    async def _more(self, *, beyond: int = 0) -> bool:
        """Wait for more than ``beyond`` chunks; return False at the end of the stream."""
        while len(self._chunks) <= beyond:
            if self._ended:
                return False
            self._check_alone()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def _check_alone(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two tasks read the same stream at the same time")

    def _take(self) -> bytes | memoryview:
        chunk = self._chunks.popleft()
        if self._start:
            chunk, self._start = chunk[self._start :], 0
        self._size -= len(chunk)
        self._make_room()
        return chunk

    def _advance(self, to: int) -> None:
        """Drop the first chunk up to offset ``to``."""
        self._size -= to - self._start
        self._start = to
        if to == len(self._chunks[0]):
            self._chunks.popleft()
            self._start = 0
        self._make_room()

    def _make_room(self) -> None:
        if self._full and self._size < self._limit:
            self._full = False
            self._on_room()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Collector:
    """Collect the first ``cap`` bytes of a stream; ``truncated`` is true if there were more."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._chunks: list[bytes | memoryview] = []
        self._tail = bytearray()
        """Small chunks joined: single bytes must not cost an object each."""
        self._size = 0
        self.truncated = False

    def add(self, data: bytes | memoryview) -> None:
        room = self._cap - self._size
        if len(data) > room:
            self.truncated = True
            data = data[:room]
        if not data:
            return
        self._size += len(data)
        if len(data) < _SMALL_BYTES and len(self._chunks) >= _MANY_CHUNKS:
            self._tail += data
            if len(self._tail) < _READ_AHEAD:
                return
            data = b""
        if self._tail:
            self._chunks.append(bytes(self._tail))
            self._tail.clear()
        if data:
            self._chunks.append(data)

    def value(self) -> bytes:
        # Joined once; a second call returns the same object.
        whole = b"".join((*self._chunks, self._tail))
        self._tail.clear()
        self._chunks = [whole]
        return whole
