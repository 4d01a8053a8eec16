"""Connections of the HTTP listener: counted from accept on, and closed to make room.

A connection is *new* until a request on it carried a valid key, *busy* while such a request is
served, and *idle* between two of them. New and idle connections can be closed at any time to make
room, so a connection limit that strangers fill does not keep out a client that has a key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Final, Literal

from union.sandbox.errors import SandboxConnectionError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox.server._auth import Grant
    from union.sandbox.server._metrics import Metrics

__all__ = [
    "BACKLOG",
    "Acceptor",
    "Connection",
    "ConnectionTable",
    "connection_limit",
    "raise_file_limit",
]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
BACKLOG: Final = 512
_RESERVE: Final = 16
"""New connections that are accepted beyond the limit, so that a key can still be checked."""
_BATCH: Final = 64
"""Connections that one turn of the event loop accepts: other work goes on in between."""
_ANSWER_S: Final = 30.0
"""How long the answer to a request without a key may take to be sent."""
_RETRY_S: Final = 0.1
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OWN_FILES: Final = 64
"""File descriptors that the process needs for itself."""
_FILES_PER_RUN: Final = 6


@dataclass(eq=False, slots=True)
class Connection:
    """One accepted connection."""

    peer: str
    state: Literal["new", "idle", "busy", "gone"] = "new"
    close: Callable[[], object] | None = None
    """Ends it at once; set as soon as there is something to end."""
    key: str = ""
    """Whose key was valid on it, while the state is idle or busy."""
    is_limited: bool = False
    timer: asyncio.TimerHandle | None = None
    answers_key: bool = False
    """The request that is served now carried a valid key."""


class ConnectionTable:
    """All connections of a server, and which of them ends when there are too many."""

    def __init__(self, limit: int, *, header_timeout_s: float, metrics: Metrics) -> None:
        self._limit = limit
        self._reserve = min(_RESERVE, limit)
        self._header_timeout_s = header_timeout_s
        self._metrics = metrics
        self._new: dict[str, dict[Connection, None]] = {}
        """By peer; the oldest first."""
        self._new_count = 0
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._by_key: Counter[str] = Counter()
        """Idle and busy connections of each key that is limited to a session."""
        self._limited = 0
        self._evicted = 0

    def __len__(self) -> int:
        return self._new_count + len(self._idle) + len(self._busy)

    # The states of a connection.

    def open(self, peer: str) -> Connection:
        """Count a connection that was just accepted; closes another one if there is no room."""
        if len(self) >= self._limit:
            self._metrics.connections_refused += 1
            if self._new_count >= self._reserve:
                self._evict_new()
            elif self._idle:
                self._end(next(iter(self._idle)))
            # Else every other connection is busy, and the reserve has room.
        connection = Connection(peer)
        self._new.setdefault(peer, {})[connection] = None
        self._new_count += 1
        self._metrics.connections = len(self)
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(self._header_timeout_s, self._expire, connection)
        return connection

    def asked(self, connection: Connection) -> None:
        """A request has arrived, and its key was not looked at."""
        connection.answers_key = False
        if connection.state == "new":
            self._stop_timer(connection)
            loop = asyncio.get_running_loop()
            connection.timer = loop.call_later(_ANSWER_S, self._expire, connection)

    def prove(self, connection: Connection, grant: Grant) -> None:
        """The request carries a valid key: the connection is busy from here on.

        Raises:
            SandboxConnectionError: the key, or the server, has no room for another connection.

        """
        if connection.state == "gone":
            raise ConnectionResetError("the connection was closed to make room")
        if connection.key != grant.key or connection.state == "new":
            self._check_share(connection, grant)
            self._remove(connection)
            connection.key, connection.is_limited = grant.key, not grant.is_full
            if connection.is_limited:
                self._by_key[grant.key] += 1
                self._limited += 1
        else:
            self._idle.pop(connection, None)
        self._stop_timer(connection)
        connection.state = "busy"
        connection.answers_key = True
        self._busy.add(connection)

    def _check_share(self, connection: Connection, grant: Grant) -> None:
        if not grant.is_full:
            mine, all_limited = max(1, self._limit // 4), max(1, self._limit // 2)
            if self._by_key[grant.key] >= mine or self._limited >= all_limited:
                raise _busy(f"connection limit of this key reached ({mine})")
        if connection.state == "new" and len(self._idle) + len(self._busy) >= self._limit:
            if not self._idle:
                raise _busy(f"connection limit reached ({self._limit})")
            self._end(next(iter(self._idle)))

    def rest(self, connection: Connection) -> None:
        """The request was answered: the connection waits for the next one."""
        if connection.state == "busy":
            self._busy.discard(connection)
            self._idle[connection] = None
            connection.state = "idle"

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection.state != "gone":
            self._remove(connection)
            connection.state = "gone"
        self._stop_timer(connection)
        self._metrics.connections = len(self)

    # Making room.

    def drop(self, connection: Connection) -> None:
        """Close a connection to make room."""
        self._metrics.connections_refused += 1
        self._end(connection)

    def make_room(self) -> None:
        """Close one connection that nothing is lost with, if there is one."""
        if self._new_count:
            self._evict_new()
        elif self._idle:
            self._end(next(iter(self._idle)))

    def _evict_new(self) -> None:
        """The oldest of the peer that has the most: one address cannot push out the others."""
        heaviest = max(self._new.values(), key=len)
        self._end(next(iter(heaviest)))
        self._evicted += 1
        _LOGGER.warning(
            "connection limit reached: closed a connection without a key",
            extra={"limit": self._limit, "closed_so_far": self._evicted},
        )

    def _expire(self, connection: Connection) -> None:
        self._metrics.connections_refused += 1
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        close = connection.close
        self.lost(connection)
        if close is not None:
            close()

    def _remove(self, connection: Connection) -> None:
        match connection.state:
            case "new":
                of_peer = self._new[connection.peer]
                del of_peer[connection]
                if not of_peer:
                    del self._new[connection.peer]
                self._new_count -= 1
            case "idle":
                del self._idle[connection]
            case "busy":
                self._busy.discard(connection)
        if connection.is_limited:
            self._limited -= 1
            self._by_key[connection.key] -= 1
            if not self._by_key[connection.key]:
                del self._by_key[connection.key]
            connection.is_limited = False

    @staticmethod
    def _stop_timer(connection: Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None


class Acceptor:
    """Accepts the connections of one listening socket.

    Not ``asyncio.Server``: that counts nothing before a TLS handshake has ended, and logs a
    traceback for every connection that waits while file descriptors are short.
    """

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        serve: Callable[[socket.socket, Connection], Awaitable[object]],
    ) -> None:
        self._sock = sock
        self._table = table
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accept nothing more."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _SHORTAGES:
                    raise
                self._wait_for_files(exc)
                return
            sock.setblocking(False)
            connection = self._table.open(_peer(sock, address))
            task = self._loop.create_task(self._begin(sock, connection))
            if connection.state == "new":
                connection.close = task.cancel
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _begin(self, sock: socket.socket, connection: Connection) -> None:
        try:
            await self._serve(sock, connection)
        except OSError as exc:
            # Strangers decide how often this happens; the type of the error is enough.
            _LOGGER.debug("a connection was not established", extra={"error": type(exc).__name__})
            self._give_up(sock, connection)
        except BaseException:
            self._give_up(sock, connection)
            raise

    def _give_up(self, sock: socket.socket, connection: Connection) -> None:
        self._table.lost(connection)
        sock.close()

    def _wait_for_files(self, exc: OSError) -> None:
        """The kernel keeps those who wait; meanwhile room is made for one of them."""
        _LOGGER.error(
            "cannot accept a connection: raise the limit of open files (ulimit -n)",
            extra={"error": errno.errorcode.get(exc.errno or 0, "")},
        )
        self._table.make_room()
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(_RETRY_S, self._go_on)

    def _go_on(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)


def _peer(sock: socket.socket, address: object) -> str:
    """What counts as one peer: an IPv4 address, an IPv6 network of 64 bits, or the Unix socket."""
    if sock.family == socket.AF_UNIX or not isinstance(address, tuple):
        return "unix"
    host = str(address[0]).partition("%")[0]
    found = ip_address(host)
    if found.version == 4:
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ip_network((int(found), 64), strict=False))


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as exc:
            _LOGGER.warning("cannot raise the limit of open files", extra={"error": str(exc)})
            hard = soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def connection_limit(wanted: int, *, files: int, runs: int) -> int:
    """Return how many connections to accept: at most half of the open files, to leave runs some."""
    limit = max(1, min(wanted, (files - _OWN_FILES) // 2))
    needed = _OWN_FILES + wanted + runs * _FILES_PER_RUN
    if needed > files:
        _LOGGER.warning(
            "the limit of open files is low for --max-connections and --max-runs",
            extra={"open_files": files, "wanted": needed, "connections": limit},
        )
    return limit


def _busy(message: str) -> SandboxConnectionError:
    return SandboxConnectionError(
        message, code="busy", hint="try again later, or close connections that are not needed"
    )
