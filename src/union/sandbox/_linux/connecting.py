"""Answers to a runner that requests a connection for its command."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TypeAlias

from union.sandbox._linux.descriptors import send_with_fds
from union.sandbox._linux.protocol import SIMPLE, Message
from union.sandbox._linux.reports import decode_connect

__all__ = ["Connect", "answer_connect"]

Connect: TypeAlias = Callable[[int, bytes, int], socket.socket]
"""Returns a socket for an address family, address and port, or raises OSError."""


def answer_connect(sock: socket.socket, data: bytes, connect: Connect) -> None:
    """Answer one request: with a connected socket, or with an errno.

    Args:
        sock: the socket to the runner.
        data: the request.
        connect: makes the connection.

    Raises:
        MalformedReportError: ``data`` is not a request.

    """
    number, family, address, port = decode_connect(data)
    try:
        with connect(family, address, port) as near:
            _send(sock, number, 0, near.fileno())
    except OSError as exc:
        _send(sock, number, exc.errno or errno.EACCES)


def _send(sock: socket.socket, number: int, error: int, *fds: int) -> None:
    """Send an answer. A runner that has ended, or does not read its socket, gets none."""
    message = SIMPLE.pack(Message.CONNECTED, number, error, 0)
    try:
        send_with_fds(sock, message, fds)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return
