"""TLS handshakes: a limited number at once, each started after a whole ClientHello has arrived.

A TLS object takes some hundred KiB, and a handshake a millisecond of the event loop. Until its
handshake starts, a connection costs a socket and a task.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from union.sandbox.server._connections import Connection, ConnectionLimiter

__all__ = ["HANDSHAKE_S", "HandshakeQueue", "sends_client_hello"]

HANDSHAKE_S: Final = 5.0
_MAX_ACTIVE: Final = 64
_STARTS_PER_TURN: Final = 4
_FAILURES_PER_COLLECTION: Final = 128

_RECORD: Final = struct.Struct(">BBBH")
_HANDSHAKE: Final = 22
_MAX_RECORD: Final = 16 * 1024
_MAX_PEEK: Final = 4096
"""A longer ClientHello counts as complete when this many bytes have arrived."""


async def sends_client_hello(sock: socket.socket) -> bool:
    """Wait for the first TLS record without consuming it; return False if it is something else."""
    try:
        head = await _peek(sock, _RECORD.size)
        if len(head) < _RECORD.size:
            return False
        fields: tuple[int, int, int, int] = _RECORD.unpack(head)
        kind, major, _, size = fields
        if kind != _HANDSHAKE or major != 3 or not 0 < size <= _MAX_RECORD:
            return False
        wanted = min(_RECORD.size + size, _MAX_PEEK)
        return len(await _peek(sock, wanted)) == wanted
    finally:
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _peek(sock: socket.socket, size: int) -> bytes:
    """Wait for ``size`` bytes, or for the end of the connection; return the bytes received."""
    loop = asyncio.get_running_loop()
    # The kernel then reports the socket as readable only when this many bytes have arrived.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    readable = loop.create_future()
    fd = sock.fileno()
    loop.add_reader(fd, _wake, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)
    return sock.recv(size, socket.MSG_PEEK)


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


class HandshakeQueue:
    """Decides which handshake starts next: peers take turns, the latest connection of each first.

    Under a flood, the client of the latest connection is the most likely to still respond.
    """

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, list[asyncio.Future[None]]] = OrderedDict()
        self._active: dict[Connection, None] = {}
        """Oldest first."""
        self._scheduled = False
        self._failed = 0

    async def enter(self, connection: Connection) -> None:
        """Wait for the turn of a connection whose ClientHello has arrived."""
        turn = self._loop.create_future()
        self._waiting.setdefault(connection.peer, []).append(turn)
        self._schedule()
        await turn
        if len(self._active) >= _MAX_ACTIVE:
            by_peer = Counter(active.peer for active in self._active)
            heaviest = by_peer.most_common(1)[0][0]
            victim = next(active for active in self._active if active.peer == heaviest)
            self.leave(victim)
            self._limiter.drop(victim)
        self._active[connection] = None

    def leave(self, connection: Connection) -> None:
        """Note that a handshake has ended; may be called more than once."""
        self._active.pop(connection, None)

    def failed(self) -> None:
        """Note that a handshake was not completed.

        asyncio leaves a reference cycle of 256 KiB behind. Under a flood, the garbage collector
        would run too late by itself.
        """
        self._failed += 1
        if self._failed >= _FAILURES_PER_COLLECTION:
            self._failed = 0
            gc.collect()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._start_some)

    def _start_some(self) -> None:
        """Start a few in every turn of the event loop, so that other work continues."""
        self._scheduled = False
        started = 0
        while self._waiting and started < _STARTS_PER_TURN:
            peer, turns = next(iter(self._waiting.items()))
            turn = turns.pop()
            if turns:
                self._waiting.move_to_end(peer)
            else:
                del self._waiting[peer]
            if not turn.done():  # It is done if the connection was closed.
                turn.set_result(None)
                started += 1
        self._schedule()
