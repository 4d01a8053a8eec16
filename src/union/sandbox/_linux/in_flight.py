"""Descriptors in flight: in messages that no process has received.

The kernel counts them for each user id. It refuses a message with descriptors while the count is
above the sender's soft limit on open files, but it adds a message to the count only after it has
copied the message's data. A thread that waits for a page of that data is past the check, so
programs with many threads reach many times their limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_exhausted", "raised_limit"]


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
