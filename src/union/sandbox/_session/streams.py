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

_LONGEST_END: Final = b"\r\n"
_SMALL: Final = 2048
_MANY: Final = 64
_READ_AHEAD: Final = 1024 * 1024
"""What is held of a stream that has a reader, or that nobody reads: then the writer is slowed."""


class StreamBuffer:
    """Bytes of one piped stream on their way to a reader.

    ``feed`` answers whether there is room for more; when room comes back, ``on_room`` is called
    once. The limit is small while this stream is being read, and large while only its sibling is,
    so that reading one stream to its end and then the other cannot stop the command.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._start = 0
        """How much of the first chunk was taken already, as lines."""
        self._partial: list[bytes] = []
        """The beginning of a line whose end has not come; kept if its reader gives up."""
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
        if len(data) < _SMALL and len(chunks) > _MANY and len(chunks[-1]) < _SMALL:
            # Bytes that come one by one must not cost an object each.
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
        """Gives what is held, and everything that comes, to somebody who keeps it all."""
        self._check_alone()
        self._into = into
        if self._partial:
            into(self._take_partial())
        while self._chunks:
            into(self._take())

    def widen(self) -> None:
        """Only the sibling stream, or the end of the command, is being waited for."""
        self._limit = UNREAD_STREAM_BYTES
        self._make_room()

    def narrow(self) -> None:
        """This stream is being read."""
        self._limit = _READ_AHEAD

    def _take_partial(self) -> bytes:
        taken = b"".join(self._partial)
        self._partial.clear()
        return taken

    async def read(self) -> bytes | memoryview:
        """The next chunk, as it came; empty at the end of the stream."""
        if self._partial:
            return self._take_partial()
        if not self._chunks:
            await self._more()
        return self._take() if self._chunks else b""

    async def read_line(self, most: int) -> str | None:
        """The next line, decoded, without its end; None at the end of the stream.

        A line longer than ``most`` bytes comes in pieces, never split inside a character. What was
        not taken stays for the next reader, whichever way it reads.
        """
        while True:
            if not self._chunks and not await self._more():
                rest = self._take_partial()
                return self._line_decoder.decode(rest, final=True) if rest else None
            room = most - sum(map(len, self._partial))
            # The end of a line may follow just behind the most that it may hold.
            chunk, start = self._first(), self._start
            stop = min(len(chunk), start + room + len(_LONGEST_END))
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
            elif stop == start + room + len(_LONGEST_END) or not await self._join_next():
                self._partial.append(chunk[start : start + room])
                self._advance(start + room)
                return self._line_decoder.decode(self._take_partial())

    async def _join_next(self) -> bool:
        """Makes one chunk of the first two; False when there is no second."""
        if len(self._chunks) == 1 and not await self._more(beyond=1):
            return False
        first = self._first()[self._start :]
        self._chunks.popleft()
        self._start = 0
        self._chunks[0] = first + self._first()
        return True

    def _first(self) -> bytes:
        """The first chunk, as bytes from now on."""
        first = self._chunks[0] = bytes(self._chunks[0])
        return first

    async def _more(self, *, beyond: int = 0) -> bool:
        """Waits until there are more than ``beyond`` chunks; False at the end of the stream."""
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
        """What of the first chunk lies before ``to`` has been taken."""
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
    """Keeps the first ``cap`` bytes of a stream and says whether there were more."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._chunks: list[bytes | memoryview] = []
        self._tail = bytearray()
        """Small pieces, put together: bytes that come one by one must not cost an object each."""
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
        if len(data) < _SMALL and len(self._chunks) >= _MANY:
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
        # Put together once: whoever asks again gets the same.
        whole = b"".join((*self._chunks, self._tail))
        self._tail.clear()
        self._chunks = [whole]
        return whole
