"""A prepared sandbox: it waits for one command, with the pipes for that command's output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.protocol import Message
from union.sandbox._linux.reports import Failure, MalformedReportError, decode_failed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from union.sandbox._linux.channel import Channel

__all__ = ["MAX_MESSAGE", "Sandbox"]

MAX_MESSAGE: Final = 512
"""The largest message of a sandbox, in bytes."""


class Sandbox:
    """A prepared sandbox: the socket to its first process, its channel and its pipes."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        *,
        channel: Channel,
        owner: int | None,
        first_pid: asyncio.Future[int] | None = None,
    ) -> None:
        self.first_pid = first_pid
        """The pid of its first process on the host, if it was requested."""
        self.number = number
        self.sock = sock
        self.channel = channel
        self.owner = owner
        """The id that must own the pipes of the command, so that it can reopen them."""
        self.was_out_of_memory: Callable[[], bool] = lambda: False
        self.peak_memory: Callable[[], int | None] = lambda: None
        self._pipes: list[tuple[int, int]] = []
        """Created ahead for the output of the command: (near end, far end)."""

    def kill(self) -> None:
        """Kill the sandbox from outside, by the launcher."""
        if not self.channel.kill(self.number) and self.sock.fileno() >= 0:
            # The launcher has died, and nearly everything with it. A sandbox that was being made
            # at that moment still runs; it ends when its socket is shut down.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def make_pipes(self) -> None:
        """Create the pipes for both output streams ahead of the command."""
        for _ in (1, 2):
            self._pipes.append(self._new_pipe())

    def pipe(self) -> tuple[int, int]:
        """Return a pipe, created ahead or now; the caller closes it."""
        return self._pipes.pop() if self._pipes else self._new_pipe()

    def _new_pipe(self) -> tuple[int, int]:
        near, far = os.pipe2(os.O_CLOEXEC)
        try:
            fcntl.fcntl(near, fcntl.F_SETFL, os.O_NONBLOCK)
            if self.owner is not None:
                # Opening /dev/stdout inside is checked against the owner of the pipe.
                os.fchown(far, self.owner, self.owner)
        except OSError:
            close_all((near, far))
            raise
        return near, far

    def close_pipes(self) -> None:
        """Close the pipes that were not used."""
        while self._pipes:
            close_all(self._pipes.pop())

    def read_failure(self) -> Failure | None:
        """Return the failure that a sandbox reported before it ended; None if it did not."""
        with contextlib.suppress(OSError, MalformedReportError):
            while data := self.sock.recv(MAX_MESSAGE):
                if int.from_bytes(data[:4], sys.byteorder) == Message.FAILED:
                    return decode_failed(data)
        return None

    def release(self) -> None:
        """Release an unused sandbox: its processes end when the socket is closed."""
        self.sock.close()
        self.close_pipes()
