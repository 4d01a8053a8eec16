"""A non-blocking socket with a read buffer.

Only the task that uses a socket closes it, after its last await on it. Closing it elsewhere would
leave the event loop watching a file descriptor number that the next socket may reuse.
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
_DISCONNECTED: Final = frozenset(
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
    """The peer ended the stream before the expected number of bytes."""


class HeadTooLongError(Exception):
    """The end of a message head was not found within the limit."""


def is_disconnect(exc: OSError) -> bool:
    """Return whether this error means that the peer disconnected or is unreachable."""
    return exc.errno in _DISCONNECTED


class Stream:
    """Buffered reads and unbuffered writes on one connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Fails on a socket that is not TCP or that the peer has already reset.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()

    async def read_head(self, limit: int) -> bytes:
        """Read through the first empty line; return no bytes if the stream ended before any.

        Raises:
            EndOfStreamError: the stream ended inside the head.
            HeadTooLongError: the first ``limit`` bytes contain no empty line.

        """
        searched = 0
        while True:
            end = self._buffer.find(b"\r\n\r\n", max(0, searched - 3))
            if end >= 0:
                return self._take(end + 4)
            if len(self._buffer) >= limit:
                raise HeadTooLongError
            searched = len(self._buffer)
            data = await self._receive(min(_READ_BYTES, limit - searched))
            if not data:
                if not searched:
                    return b""
                raise EndOfStreamError
            self._buffer += data

    async def read_exactly(self, size: int) -> bytes:
        """Read exactly ``size`` bytes.

        Raises:
            EndOfStreamError: the stream ended before that.

        """
        while len(self._buffer) < size:
            data = await self._receive(_READ_BYTES)
            if not data:
                raise EndOfStreamError
            self._buffer += data
        return self._take(size)

    async def read_some(self, size: int = _READ_BYTES) -> bytes:
        """Read at most ``size`` bytes; return no bytes at the end of the stream."""
        if self._buffer:
            return self._take(min(size, len(self._buffer)))
        return await self._receive(size)

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; wait while the peer is slow."""
        await self._loop.sock_sendall(self.sock, data)

    async def _receive(self, size: int) -> bytes:
        """Read from the peer, past the buffer; return no bytes at the end of the stream."""
        return await self._loop.sock_recv(self.sock, size)

    @property
    def is_ended(self) -> bool:
        """Whether the peer has closed its sending direction and all its bytes were read."""
        if self._buffer:
            return False
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def has_buffered(self) -> bool:
        """Whether the read buffer is not empty."""
        return bool(self._buffer)

    def take_buffered(self) -> bytes:
        """Return the content of the read buffer without waiting."""
        return self._take(len(self._buffer))

    def unread(self, data: bytes) -> None:
        """Put bytes back at the front of the read buffer."""
        self._buffer[:0] = data

    def shutdown_write(self) -> None:
        """Shut down the sending direction."""
        with contextlib.suppress(OSError):  # the peer may have disconnected already
            self.sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Close with a reset."""
        with contextlib.suppress(OSError):  # fails on a socket that is closed already
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()

    def close(self) -> None:
        """Close the socket without forcing a reset."""
        self.sock.close()

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
