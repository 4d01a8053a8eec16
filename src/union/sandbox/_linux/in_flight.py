"""Descriptors in flight: in messages that no process has received.

The kernel counts them for each user id. It refuses a message with descriptors while the count is
above the sender's soft limit on open files, but it adds a message to the count only after it has
copied the message's data. A thread that waits for a page of that data is past the check, so
programs with many threads reach many times their limit.

A message waits in a socket. Sockets that only a system call holds, or another message, are in no
descriptor table; the network namespace lists them all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MOST_PER_MESSAGE", "is_exhausted", "raised_limit", "unlisted_sockets"]

MOST_PER_MESSAGE: Final = 253
"""Descriptors that the kernel accepts in one message."""
_SEARCH_S: Final = 0.2
_INODE: Final = 6
"""The column of /proc/net/unix."""


class _Limit:
    lock = threading.Lock()


def is_exhausted() -> bool:
    """Return whether this process cannot pass descriptors, because its user has too many."""
    try:
        near, far = socket.socketpair()
    except OSError:
        return False
    with near, far:
        try:
            socket.send_fds(near, [b"x"], [near.fileno()])
        except OSError as exc:
            return exc.errno == errno.ETOOMANYREFS
    return False


def unlisted_sockets(pids: Iterable[int], *, seconds: float = _SEARCH_S) -> int | None:
    """Return how many local sockets of the processes' networks are in none of their tables.

    None if they are in the network of this process, which has sockets of others. Tables that are
    not read within ``seconds`` list nothing: a program cannot hide by having many.
    """
    until = time.monotonic() + seconds
    own = set(_inodes("self")) - {"0"}  # the socket pair of an event loop, for example
    networks: dict[str, list[str]] = {}
    listed: set[str] = set()
    for pid in pids:
        try:
            network = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            network = ""  # it forbids inspection
        if network not in networks:
            networks[network] = _inodes(str(pid))
            if not own.isdisjoint(networks[network]):
                return None
        for thread in _names(f"/proc/{pid}/task"):  # a thread may have its own table
            if time.monotonic() > until:
                break
            for fd in _names(f"/proc/{pid}/task/{thread}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    listed.add(os.readlink(f"/proc/{pid}/task/{thread}/fd/{fd}"))
    inodes = [inode for table in networks.values() for inode in table]
    return sum(f"socket:[{inode}]" not in listed for inode in inodes)


def _inodes(pid: str) -> list[str]:
    try:
        table = Path(f"/proc/{pid}/net/unix").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []  # it has ended meanwhile
    return [line.split()[_INODE] for line in table.splitlines()[1:]]


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # it has ended meanwhile, or forbids inspection
        return []


@contextlib.contextmanager
def raised_limit() -> Iterator[None]:
    """Raise the soft limit of this process to the hard limit, for one message."""
    with _Limit.lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _after_fork() -> None:
    _Limit.lock = threading.Lock()  # another thread may have held it at the moment of the fork


os.register_at_fork(after_in_child=_after_fork)
