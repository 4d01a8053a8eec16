"""Ids that own nothing on this host, one for each session of a caller that is root.

The kernel counts many things by user: inotify instances, epoll watches, queued signals, descriptors
in flight, processes. With an id of its own a session shares none of these counters with the host
or with another session.

A process reserves a block of ids and hands them out one by one. The reservation is a name in the
abstract socket namespace: it costs one descriptor, ends with the process whatever becomes of it,
and leaves nothing behind. Another network namespace has other names; there the block is chosen at
random from thousands.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Final

__all__ = ["IDS", "HostIds", "SessionId", "id_range"]

_FIRST, _COUNT = 2_000_000_000, 100_000_000
"""Beyond what accounts, containers and their id ranges use."""
_SMALL_FIRST, _SMALL_END = 30_000, 60_000
"""The same in a container that has 65536 ids."""
_ORDINARY: Final = 65_536
_BLOCK: Final = 256
_TRIES: Final = 64


def _mapped(name: str) -> list[range]:
    """The ids that exist in this user namespace."""
    lines = Path(f"/proc/self/{name}_map").read_text(encoding="ascii").splitlines()
    rows = [tuple(map(int, line.split())) for line in lines]
    return [range(row[0], row[0] + row[2]) for row in rows]


def _has(ranges: list[range], wanted: range) -> bool:
    return any(r.start <= wanted.start and wanted.stop <= r.stop for r in ranges)


@functools.cache
def id_range() -> range | None:
    """The ids to choose from, as user and as group; None where this container has too few."""
    users, groups = _mapped("uid"), _mapped("gid")
    largest = max((r for r in users if r.stop > _ORDINARY), key=len, default=range(0))
    beyond = range(max(largest.start, _ORDINARY), min(largest.stop, _ORDINARY + _COUNT))
    for wanted in (
        range(_FIRST, _FIRST + _COUNT),
        beyond,
        range(_SMALL_FIRST, _SMALL_END),
    ):
        if len(wanted) >= _BLOCK and _has(users, wanted) and _has(groups, wanted):
            return wanted
    return None


class HostIds:
    """Hands out ids; one table for the process."""

    _lock = threading.Lock()

    def __init__(self) -> None:
        self._reserved: list[tuple[socket.socket, range]] = []
        self._free: list[int] = []

    def take(self) -> int:
        """An id that no other session uses.

        The one that was returned last comes first: the launcher keeps a namespace for it.
        """
        with self._lock:
            if not self._free:
                self._free.extend(reversed(self._reserve()))
            return self._free.pop()

    def release(self, number: int) -> None:
        """Return an id whose processes are gone."""
        with self._lock:
            entry = next((entry for entry in self._reserved if number in entry[1]), None)
            if entry is None:
                return
            self._free.append(number)
            sock, block = entry
            if len(self._reserved) > 1 and sum(one in block for one in self._free) == len(block):
                # A block stays for the next session; the others go back when they are unused.
                self._reserved.remove(entry)
                self._free = [one for one in self._free if one not in block]
                sock.close()

    def _reserve(self) -> range:
        where = id_range()
        if where is None:
            raise OSError(errno.EINVAL, "this user namespace has no ids to spare")
        blocks = len(where) // _BLOCK
        for _ in range(_TRIES):
            block = secrets.randbelow(blocks)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                sock.bind(f"\0union.sandbox/ids/{where.start}/{block}")
            except OSError as exc:
                sock.close()
                if exc.errno != errno.EADDRINUSE:
                    raise
                continue
            ids = where[block * _BLOCK : (block + 1) * _BLOCK]
            self._reserved.append((sock, ids))
            return ids
        raise OSError(errno.EADDRINUSE, f"no free block of {_BLOCK} ids in {_TRIES} attempts")

    def forget(self) -> None:
        """In a forked copy of the process: the ids belong to the parent."""
        for sock, _ in self._reserved:
            sock.close()
        self._reserved, self._free = [], []
        HostIds._lock = threading.Lock()


IDS: Final = HostIds()
os.register_at_fork(after_in_child=IDS.forget)


class SessionId:
    """The id that a session's code runs as, where the caller is root.

    It is reserved at its first use and returned when the session's processes are gone.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def number(self) -> int:
        if self._number is None:
            self._number = IDS.take()
        return self._number

    def release(self) -> None:
        if self._number is not None:
            IDS.release(self._number)
            self._number = None
