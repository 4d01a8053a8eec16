"""A stream whose bytes are encrypted with TLS, over a stream of plain bytes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from typing import Final

from union.sandbox._net.stream import EndOfStreamError, Stream

__all__ = ["TlsStream"]

_READ_BYTES: Final = 256 * 1024
_WRITE_BYTES: Final = 256 * 1024
_HANDSHAKE_TIMEOUT_S: Final = 20.0


class TlsStream(Stream):
    """TLS over a connected stream, with OpenSSL in memory. The event loop moves the bytes.

    Args:
        under: the stream of encrypted bytes; this stream uses and closes its socket.
        context: the settings and certificates.
        server_hostname: the name that the server's certificate must have. Default None: this is
            the server's end.

    """

    def __init__(
        self, under: Stream, context: ssl.SSLContext, *, server_hostname: str | None = None
    ) -> None:
        super().__init__(under.sock)
        self._under = under
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._sending = asyncio.Lock()
        self._has_ended = False

    async def handshake(self) -> None:
        """Perform the handshake.

        Raises:
            ssl.SSLError: it failed; the peer has received an alert.
            EndOfStreamError: the peer disconnected.
            TimeoutError: it took too long.

        """
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._fill():
                        raise EndOfStreamError from None
                except ssl.SSLError:
                    with contextlib.suppress(OSError):  # the peer may be gone
                        await self._flush()
                    raise
                else:
                    await self._flush()
                    return

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; wait while the peer is slow."""
        view = memoryview(data)
        while view:
            try:
                size = self._tls.write(view[:_WRITE_BYTES])
            except ssl.SSLError as exc:
                raise ConnectionResetError(errno.ECONNRESET, str(exc)) from exc
            view = view[size:]
            await self._flush()

    def finish(self) -> None:
        """Announce the end of the sent bytes, so that the peer sees that none is missing.

        Does not wait: a peer that reads nothing gets no announcement.
        """
        if self._sending.locked():
            return
        with contextlib.suppress(ssl.SSLError, OSError):  # the peer may be gone
            # Writes the announcement, then wants that of the peer, which is not waited for.
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.sock.send(self._outgoing.read())

    async def _receive(self, size: int) -> bytes:
        while not self._has_ended:
            if self._has_records and (data := self._decrypt(size)):
                return data
            if self._has_ended:
                break
            await self._flush()
            await self._fill()
        return b""

    @property
    def _has_records(self) -> bool:
        """Whether a read can succeed; one that cannot costs an exception."""
        return bool(self._incoming.pending or self._incoming.eof or self._tls.pending())

    def _decrypt(self, size: int) -> bytes:
        """Return up to ``size`` bytes of the records that have arrived."""
        pieces: list[bytes] = []
        try:
            while size > 0:
                data = self._tls.read(size)
                if not data:
                    self._has_ended = True
                    break
                pieces.append(data)
                size -= len(data)
                if not self._has_records:
                    break
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._has_ended = True
        except ssl.SSLError as exc:
            if not pieces:
                raise ConnectionResetError(errno.ECONNRESET, str(exc)) from exc
            self._has_ended = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _fill(self) -> bool:
        """Read encrypted bytes; return False at their end."""
        data = await self._under.read_some(_READ_BYTES)
        if not data:
            self._incoming.write_eof()
            return False
        self._incoming.write(data)
        return True

    async def _flush(self) -> None:
        if not self._outgoing.pending:
            return
        # Both directions may have something to send; records must not be interleaved.
        async with self._sending:
            if data := self._outgoing.read():
                await self._under.send(data)

    @property
    def is_readable(self) -> bool:
        """Whether there is anything to read, or the peer has ended. Idle peers have nothing."""
        if self._buffer or self._has_ended or self._tls.pending() or self._incoming.pending:
            return True
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def is_ended(self) -> bool:
        """Whether the peer has closed its sending direction and all its bytes were read."""
        return not self._buffer and (self._has_ended or self._under.is_ended)
