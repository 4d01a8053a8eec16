"""What carries messages between a client and its server; and the line, which needs no HTTP.

A line is a socket that the two have shared since one of them started the other. A message on it is
its size in four bytes, then its bytes. An empty one asks whether the other side is still there, or
answers that it is.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, Protocol, Self

from union.sandbox._wire.frames import MAX_MESSAGE, WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

__all__ = ["Carrier", "Line"]

_SIZE: Final = struct.Struct(">I")
_GOODBYE_S: Final = 2.0
_DOUBT_S: Final = 1.0
"""Who asked may have been busy: the answer is there, and was not read yet."""


class Carrier(Protocol):
    """A connection: takes whole messages to the other side, and brings theirs, until it ends."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """What comes; raises ``WireError`` for what cannot be a message."""
        ...

    async def send(self, pieces: Sequence[bytes]) -> bool:
        """One message; returns when there is room for more. False: nobody takes it any more."""
        ...

    async def close(self, why: str = "") -> None:
        """Ends it, and says why if that can be said."""
        ...

    @property
    def end(self) -> str:
        """How it ended."""
        ...


class Line:
    """One end of a line. With ``asks_every_s`` it asks, and ends when there is no answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        asks_every_s: float | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._every_s = asks_every_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._heard = True
        self._doubts = False
        self.end = "closed"
        if asks_every_s is not None:
            self._timer = self._loop.call_later(asks_every_s, self._ask, asks_every_s)

    @classmethod
    async def over(cls, sock: socket.socket, *, asks_every_s: float | None = None) -> Self:
        """A line over a connected socket, which is its own from here on."""
        try:
            reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_MESSAGE)
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer, asks_every_s=asks_every_s)

    def _ask(self, every_s: float) -> None:
        if self._heard:
            self._heard = self._doubts = False
            self._put((b"",))
            self._timer = self._loop.call_later(every_s, self._ask, every_s)
        elif not self._doubts:
            self._doubts = True
            self._timer = self._loop.call_later(_DOUBT_S, self._ask, every_s)
        else:
            self.end = "the other side does not answer"
            self._writer.transport.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            try:
                (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
                if size > MAX_MESSAGE:
                    raise WireError(f"a message of {size} bytes")
                message = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise StopAsyncIteration from None
            self._heard = True
            if message:
                return message
            if self._every_s is None:
                self._put((b"",))

    def _put(self, pieces: Sequence[bytes]) -> bool:
        if self._writer.is_closing():
            return False
        self._writer.write(b"".join((_SIZE.pack(sum(map(len, pieces))), *pieces)))
        return True

    async def send(self, pieces: Sequence[bytes]) -> bool:
        if not self._put(pieces):
            return False
        try:
            await self._writer.drain()
        except ConnectionError:
            return False
        return not self._writer.is_closing()

    async def close(self, why: str = "") -> None:
        self.end = why or self.end
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        if self._closing is None:
            # A task: whoever waits here may be cancelled, and another come.
            self._closing = self._loop.create_task(self._writer.wait_closed())
            self._closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({self._closing}, timeout=_GOODBYE_S)
        finally:
            self._writer.transport.abort()
