"""TLS handshakes of strangers: few at once, begun only when a whole ClientHello has arrived.

A TLS object takes some hundred KiB, and a handshake a millisecond of the event loop. Until its turn
comes, a connection costs a socket and a task.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from union.sandbox.server._connections import Connection, ConnectionTable

__all__ = ["HANDSHAKE_S", "HandshakeQueue", "sends_client_hello"]

HANDSHAKE_S: Final = 5.0
_AT_ONCE: Final = 64
_PER_TURN: Final = 4
_COLLECT_AFTER: Final = 128

_RECORD: Final = struct.Struct(">BBBH")
_HANDSHAKE: Final = 22
_MAX_RECORD: Final = 16 * 1024
_MAX_AWAITED: Final = 4096
"""Of a very long ClientHello the first bytes are enough."""


async def sends_client_hello(sock: socket.socket) -> bool:
    """Wait until the first TLS record is there, without reading it; False: it is something else."""
    try:
        head = await _peek(sock, _RECORD.size)
        if len(head) < _RECORD.size:
            return False
        fields: tuple[int, int, int, int] = _RECORD.unpack(head)
        kind, major, _, size = fields
        if kind != _HANDSHAKE or major != 3 or not 0 < size <= _MAX_RECORD:
            return False
        wanted = min(_RECORD.size + size, _MAX_AWAITED)
        return len(await _peek(sock, wanted)) == wanted
    finally:
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _peek(sock: socket.socket, size: int) -> bytes:
    """Wait for ``size`` bytes, or for the end of the connection; return what is there."""
    loop = asyncio.get_running_loop()
    # The kernel reports the socket as readable when this many bytes are there.
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
    """Decides which handshake begins next: peers take turns, the latest connection of each first.

    The latest, because under a flood a client that just came is still there to answer, and those
    who came to stall are not waited for.
    """

    def __init__(self, table: ConnectionTable) -> None:
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, list[asyncio.Future[None]]] = OrderedDict()
        self._active: dict[Connection, None] = {}
        """The oldest first."""
        self._scheduled = False
        self._failed = 0

    async def enter(self, connection: Connection) -> None:
        """Wait for the turn of a connection whose ClientHello is there."""
        turn = self._loop.create_future()
        self._waiting.setdefault(connection.peer, []).append(turn)
        self._schedule()
        await turn
        if len(self._active) >= _AT_ONCE:
            by_peer = Counter(active.peer for active in self._active)
            heaviest = by_peer.most_common(1)[0][0]
            victim = next(active for active in self._active if active.peer == heaviest)
            self.leave(victim)
            self._table.drop(victim)
        self._active[connection] = None

    def leave(self, connection: Connection) -> None:
        """The handshake has ended, in whichever way; may be called again."""
        self._active.pop(connection, None)

    def failed(self) -> None:
        """A handshake was not completed.

        What asyncio leaves of one refers to itself and keeps 256 KiB: under a flood, the garbage
        collector would come by too late.
        """
        self._failed += 1
        if self._failed >= _COLLECT_AFTER:
            self._failed = 0
            gc.collect()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        """A few in every turn of the event loop: the work of clients goes on in between."""
        self._scheduled = False
        begun = 0
        while self._waiting and begun < _PER_TURN:
            peer, turns = next(iter(self._waiting.items()))
            turn = turns.pop()
            if turns:
                self._waiting.move_to_end(peer)
            else:
                del self._waiting[peer]
            if not turn.done():  # or its connection is gone
                turn.set_result(None)
                begun += 1
        self._schedule()
