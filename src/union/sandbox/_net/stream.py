"""A non-blocking socket with the bytes that were read too far.

Rules: a socket is closed only by the task that uses it, after its last await on it; closing it
from elsewhere would leave the loop watching a number that the next socket may get.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from typing import Final

__all__ = ["EndOfStreamError", "HeadTooLongError", "Stream", "is_disconnect"]

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_READ_BYTES: Final = 16 * 1024
_GONE: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    }
)


class EndOfStreamError(Exception):
    """The other side ended in the middle of something."""


class HeadTooLongError(Exception):
    """The end of a head was not found within its limit."""


def is_disconnect(exc: OSError) -> bool:
    """Whether this is one of the ordinary ways in which a connection ends badly."""
    return exc.errno in _GONE


class Stream:
    """Reads with a buffer, writes through; ``abort()`` lets the other side see a reset."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Fails on a socket that is not TCP, or that the peer has reset already.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()

    async def read_head(self, limit: int) -> bytes:
        """Read up to and with an empty line; empty bytes if the stream ended before anything.

        Raises:
            EndOfStreamError: it ended inside the head.
            HeadTooLongError: ``limit`` bytes held no empty line.

        """
        searched = 0
        while True:
            end = self._buffer.find(b"\r\n\r\n", max(0, searched - 3))
            if end >= 0:
                return self._take(end + 4)
            if len(self._buffer) >= limit:
                raise HeadTooLongError
            searched = len(self._buffer)
            data = await self._loop.sock_recv(self.sock, min(_READ_BYTES, limit - searched))
            if not data:
                if not searched:
                    return b""
                raise EndOfStreamError
            self._buffer += data

    async def read_exactly(self, size: int) -> bytes:
        """Read ``size`` bytes.

        Raises:
            EndOfStreamError: there were fewer.

        """
        while len(self._buffer) < size:
            data = await self._loop.sock_recv(self.sock, _READ_BYTES)
            if not data:
                raise EndOfStreamError
            self._buffer += data
        return self._take(size)

    async def read_some(self, size: int = _READ_BYTES) -> bytes:
        """Return what is there, at most ``size`` bytes; empty at the end."""
        if self._buffer:
            return self._take(min(size, len(self._buffer)))
        return await self._loop.sock_recv(self.sock, size)

    async def send(self, data: bytes) -> None:
        """Send all of it; waits while the other side is slow."""
        await self._loop.sock_sendall(self.sock, data)

    @property
    def has_buffered(self) -> bool:
        """Whether something was read that nobody has taken yet."""
        return bool(self._buffer)

    def take_buffered(self) -> bytes:
        """Return what was read too far, without waiting."""
        return self._take(len(self._buffer))

    def unread(self, data: bytes) -> None:
        """Put bytes back in front."""
        self._buffer[:0] = data

    def shutdown_write(self) -> None:
        """Tell the other side that nothing more will come."""
        with contextlib.suppress(OSError):  # it may be gone already, which tells it as well
            self.sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Close so that the other side sees a reset, at once."""
        with contextlib.suppress(OSError):  # not possible on a socket that is dead already
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()

    def close(self) -> None:
        """Close in order."""
        self.sock.close()

    def _take(self, size: int) -> bytes:
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece
