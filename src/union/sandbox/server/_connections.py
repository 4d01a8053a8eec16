"""Connections of the HTTP listener: accepted, counted, and closed to make room.

A connection is *new* until a request on it carried a valid key, *busy* while such a request is
served, and *idle* between two of them. New and idle connections can be closed at any time to make
room: connections without a key that fill the limit do not block a client that has one.
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
    "ConnectionLimiter",
    "connection_limit",
    "raise_file_limit",
]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
BACKLOG: Final = 512
_RESERVE: Final = 16
"""New connections accepted beyond the limit, so that their keys can still be checked."""
_ACCEPTS_PER_TURN: Final = 64
"""Connections accepted in one turn of the event loop, so that other work continues."""
_RESPONSE_TIMEOUT_S: Final = 30.0
"""Longest time to send the response to a request without a key."""
_RETRY_S: Final = 0.1
_RESOURCE_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RESERVED_FILES: Final = 64
"""File descriptors that the process itself needs."""
_FILES_PER_RUN: Final = 6


@dataclass(eq=False, slots=True)
class Connection:
    """One accepted connection."""

    peer: str
    state: Literal["new", "idle", "busy", "closed"] = "new"
    close: Callable[[], object] | None = None
    """Closes it at once; set as soon as there is a task or a transport to close."""
    key: str = ""
    """Identity of the last valid key, while the state is idle or busy."""
    is_limited: bool = False
    timer: asyncio.TimerHandle | None = None
    has_valid_key: bool = False
    """Whether the request that is being served carried a valid key."""


class ConnectionLimiter:
    """Counts the connections of a server, and closes one when the limit is reached."""

    def __init__(self, limit: int, *, header_timeout_s: float, metrics: Metrics) -> None:
        self._limit = limit
        self._reserve = min(_RESERVE, limit)
        self._header_timeout_s = header_timeout_s
        self._metrics = metrics
        self._new: dict[str, dict[Connection, None]] = {}
        """By peer, oldest first."""
        self._new_total = 0
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._by_key: Counter[str] = Counter()
        """Idle and busy connections of each key that is limited to a session."""
        self._limited = 0
        self._evicted = 0

    def __len__(self) -> int:
        return self._new_total + len(self._idle) + len(self._busy)

    # States of a connection.

    def open(self, peer: str) -> Connection:
        """Count a connection that was just accepted; close another one if the limit is reached."""
        if len(self) >= self._limit:
            self._metrics.connections_refused += 1
            if self._new_total >= self._reserve:
                self._evict_new()
            elif self._idle:
                self._close(next(iter(self._idle)))
            # Else every other connection is busy, and the reserve has room.
        connection = Connection(peer)
        self._new.setdefault(peer, {})[connection] = None
        self._new_total += 1
        self._metrics.connections = len(self)
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(self._header_timeout_s, self._expire, connection)
        return connection

    def request_received(self, connection: Connection) -> None:
        """Note that a request has arrived whose key is not checked yet."""
        connection.has_valid_key = False
        if connection.state == "new":
            self._stop_timer(connection)
            loop = asyncio.get_running_loop()
            connection.timer = loop.call_later(_RESPONSE_TIMEOUT_S, self._expire, connection)

    def authenticated(self, connection: Connection, grant: Grant) -> None:
        """Mark a connection as busy: its request carries a valid key.

        Raises:
            SandboxConnectionError: code ``busy``; the connection limit of the key or of the server
                is reached.

        """
        if connection.state == "closed":
            raise ConnectionResetError("the connection was closed to make room")
        if connection.key != grant.key or connection.state == "new":
            self._check_limits(connection, grant)
            self._remove(connection)
            connection.key, connection.is_limited = grant.key, not grant.is_full
            if connection.is_limited:
                self._by_key[grant.key] += 1
                self._limited += 1
        else:
            self._idle.pop(connection, None)
        self._stop_timer(connection)
        connection.state = "busy"
        connection.has_valid_key = True
        self._busy.add(connection)

    def _check_limits(self, connection: Connection, grant: Grant) -> None:
        if not grant.is_full:
            mine, all_limited = max(1, self._limit // 4), max(1, self._limit // 2)
            if self._by_key[grant.key] >= mine or self._limited >= all_limited:
                raise _busy(f"connection limit of this key reached ({mine})")
        if connection.state == "new" and len(self._idle) + len(self._busy) >= self._limit:
            if not self._idle:
                raise _busy(f"connection limit reached ({self._limit})")
            self._close(next(iter(self._idle)))

    def request_finished(self, connection: Connection) -> None:
        """Mark a connection as idle: its request was answered."""
        if connection.state == "busy":
            self._busy.discard(connection)
            self._idle[connection] = None
            connection.state = "idle"

    def connection_closed(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        if connection.state != "closed":
            self._remove(connection)
            connection.state = "closed"
        self._stop_timer(connection)
        self._metrics.connections = len(self)

    # Making room.

    def drop(self, connection: Connection) -> None:
        """Close a connection to make room."""
        self._metrics.connections_refused += 1
        self._close(connection)

    def make_room(self) -> None:
        """Close one new or idle connection, if there is one."""
        if self._new_total:
            self._evict_new()
        elif self._idle:
            self._close(next(iter(self._idle)))

    def _evict_new(self) -> None:
        """Close the oldest new connection of the peer with the most, so that peers are equal."""
        heaviest = max(self._new.values(), key=len)
        self._close(next(iter(heaviest)))
        self._evicted += 1
        _LOGGER.warning(
            "connection limit reached, closed a connection without a key",
            extra={"limit": self._limit, "closed_so_far": self._evicted},
        )

    def _expire(self, connection: Connection) -> None:
        self._metrics.connections_refused += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        close = connection.close
        self.connection_closed(connection)
        if close is not None:
            close()

    def _remove(self, connection: Connection) -> None:
        match connection.state:
            case "new":
                of_peer = self._new[connection.peer]
                del of_peer[connection]
                if not of_peer:
                    del self._new[connection.peer]
                self._new_total -= 1
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

    ``asyncio.Server`` would report a connection only after its TLS handshake, and log a traceback
    for every accept that fails for want of file descriptors.
    """

    def __init__(
        self,
        sock: socket.socket,
        limiter: ConnectionLimiter,
        serve: Callable[[socket.socket, Connection], Awaitable[object]],
    ) -> None:
        self._sock = sock
        self._limiter = limiter
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
        """Accept no further connections."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _RESOURCE_ERRORS:
                    raise
                self._pause(exc)
                return
            sock.setblocking(False)
            connection = self._limiter.open(_peer(sock, address))
            task = self._loop.create_task(self._serve_one(sock, connection))
            if connection.state == "new":
                connection.close = task.cancel
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_one(self, sock: socket.socket, connection: Connection) -> None:
        try:
            await self._serve(sock, connection)
        except OSError as exc:
            # Unauthenticated peers decide how often this happens, so only the type is logged.
            _LOGGER.debug("connection not established", extra={"error": type(exc).__name__})
            self._discard(sock, connection)
        except BaseException:
            self._discard(sock, connection)
            raise

    def _discard(self, sock: socket.socket, connection: Connection) -> None:
        self._limiter.connection_closed(connection)
        sock.close()

    def _pause(self, exc: OSError) -> None:
        """Pause accepting and close a connection; the backlog keeps those that wait."""
        _LOGGER.error(
            "cannot accept a connection: raise the limit of open files (ulimit -n)",
            extra={"error": errno.errorcode.get(exc.errno or 0, "")},
        )
        self._limiter.make_room()
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)


def _peer(sock: socket.socket, address: object) -> str:
    """Return what counts as one peer: an IPv4 address, an IPv6 /64 network, or the Unix socket."""
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
    """Raise the soft limit of open files to the hard limit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as exc:
            _LOGGER.warning("cannot raise the limit of open files", extra={"error": str(exc)})
            hard = soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def connection_limit(wanted: int, *, files: int, runs: int) -> int:
    """Return how many connections to accept: at most half of the open files; runs need the rest."""
    limit = max(1, min(wanted, (files - _RESERVED_FILES) // 2))
    needed = _RESERVED_FILES + wanted + runs * _FILES_PER_RUN
    if needed > files:
        _LOGGER.warning(
            "limit of open files is too low for --max-connections and --max-runs",
            extra={"open_files": files, "wanted": needed, "connections": limit},
        )
    return limit


def _busy(message: str) -> SandboxConnectionError:
    return SandboxConnectionError(
        message, code="busy", hint="retry later, or close connections that are not needed"
    )
