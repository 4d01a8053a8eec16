"""Message streams between a client and its server; ``SocketStream`` needs no HTTP.

A ``SocketStream`` uses a socket pair that the two processes have shared since one of them started
the other. Each message is its size in four bytes, then its bytes. An empty message is a ping or
the reply to one.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, Protocol, Self

from union.sandbox._wire.frames import MAX_MESSAGE, WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

__all__ = ["MessageStream", "SocketStream"]

_SIZE: Final = struct.Struct(">I")
_CLOSE_S: Final = 2.0
_SECOND_CHANCE_S: Final = 1.0
"""The event loop of this side may have been busy: a reply can be waiting in the socket unread."""


class MessageStream(Protocol):
    """A connection that carries whole messages in both directions until it is closed."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the messages received; raise ``WireError`` for a malformed one."""
        ...

    async def send(self, pieces: Sequence[bytes]) -> bool:
        """Send one message; return when there is room for more, False if the peer is gone."""
        ...

    async def close(self, why: str = "") -> None:
        """Close the connection, and send the reason if the protocol can carry one."""
        ...

    @property
    def close_reason(self) -> str:
        """Why the connection ended."""
        ...


class SocketStream:
    """One end of a socket pair. With ``ping_every_s`` it pings, and closes without a reply."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        ping_every_s: float | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._every_s = ping_every_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._has_received = True
        """Whether a message has arrived since the last ping."""
        self._is_second_chance = False
        self.close_reason = "closed"
        if ping_every_s is not None:
            self._timer = self._loop.call_later(ping_every_s, self._ping, ping_every_s)

    @classmethod
    async def from_socket(cls, sock: socket.socket, *, ping_every_s: float | None = None) -> Self:
        """Return a stream over a connected socket, and take over its ownership."""
        try:
            reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_MESSAGE)
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer, ping_every_s=ping_every_s)

    def _ping(self, every_s: float) -> None:
        if self._has_received:
            self._has_received = self._is_second_chance = False
            self._put((b"",))
            self._timer = self._loop.call_later(every_s, self._ping, every_s)
        elif not self._is_second_chance:
            self._is_second_chance = True
            self._timer = self._loop.call_later(_SECOND_CHANCE_S, self._ping, every_s)
        else:
            self.close_reason = "the other side does not answer"
            self._writer.transport.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            try:
                (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
                if size > MAX_MESSAGE:
                    raise WireError(f"a message has at most {MAX_MESSAGE} bytes, got {size}")
                message = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise StopAsyncIteration from None
            self._has_received = True
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
        self.close_reason = why or self.close_reason
        if self._timer is not None:
            self._timer.cancel()
        self._writer.close()
        if self._closing is None:
            # A task, because a waiting caller may be cancelled and another one may wait after it.
            self._closing = self._loop.create_task(self._writer.wait_closed())
            self._closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({self._closing}, timeout=_CLOSE_S)
        finally:
            self._writer.transport.abort()
