"""Messages over a stream socket, for systems without SOCK_SEQPACKET on Unix sockets.

A frame begins with the number of its bytes and of its descriptors. The launcher on the other end
(`native/posix/frame.c`) reads the same frames. Descriptors travel from the host to the launcher
only: a stream may deliver the end of one frame together with the beginning of the next.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer

__all__ = ["HEAD", "FramedSocket"]

HEAD: Final = struct.Struct("=II")
"""struct frame: size, number of descriptors."""
_READ_BYTES: Final = 64 * 1024
_BUFFER_BYTES: Final = 256 * 1024
"""The default of macOS is 8 KiB; the largest message has 60 KiB."""
_MAX_FRAME_BYTES: Final = 1024 * 1024
_STUCK_S: Final = 10.0


class FramedSocket(socket.socket):
    """A stream socket whose send and receive calls carry whole messages, like SOCK_SEQPACKET."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self._received = bytearray()

    @classmethod
    def pair(cls) -> tuple[FramedSocket, socket.socket]:
        """Return our end, and the plain socket at the other end, which is sent away."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        return cls(ours), theirs

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        """Send one message; see `sendmsg`."""
        return self.sendmsg([data], (), flags)

    def sendmsg(
        self,
        buffers: Iterable[ReadableBuffer],
        ancdata: Iterable[tuple[int, int, ReadableBuffer]] = (),
        flags: int = 0,
        address: Any = None,  # noqa: ARG002 - of the base class
        /,
    ) -> int:
        """Send one message with copies of the descriptors in ``ancdata``; they stay the caller's.

        Raises:
            BlockingIOError: nothing was sent.
            BrokenPipeError: the other end is closed, or stopped reading in the middle of a frame.

        """
        body = b"".join(bytes(part) for part in buffers)
        rights = list(ancdata)
        count = sum(memoryview(data).cast("B").nbytes // _INT for _, _, data in rights)
        frame = memoryview(HEAD.pack(len(body), count) + body)
        sent = super().sendmsg([frame], rights, flags)
        while sent < len(frame):
            sent += self._send_rest(frame[sent:])
        return len(body)

    def _send_rest(self, rest: memoryview) -> int:
        _, writable, _ = select.select([], [self], [], _STUCK_S)
        if not writable:
            self.shutdown(socket.SHUT_RDWR)  # a part of a frame makes every later one unreadable
            raise BrokenPipeError(errno.EPIPE, "the other end stopped reading")
        return super().send(rest)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Receive one message, cut to ``size`` bytes; empty at the end of the stream.

        Raises:
            BlockingIOError: no whole message has arrived.
            OSError: EPROTO if the stream holds no frame.

        """
        while (message := self._first()) is None:
            data = super().recv(_READ_BYTES, flags)
            if not data:
                return b""
            self._received += data
        return message[:size]

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0, /) -> Any:  # noqa: ARG002
        """Receive one message; none carries descriptors in this direction."""
        return self.recv(bufsize), [], 0, None

    def _first(self) -> bytes | None:
        if len(self._received) < HEAD.size:
            return None
        size, descriptors = HEAD.unpack_from(self._received)
        if size > _MAX_FRAME_BYTES or descriptors:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        end = HEAD.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[HEAD.size : end])
        del self._received[:end]
        return message


_INT: Final = struct.calcsize("=i")
