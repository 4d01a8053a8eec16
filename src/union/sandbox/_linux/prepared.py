"""A prepared sandbox: it waits for its one command, with the pipes for that command's output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.protocol import SIMPLE, Message

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from union.sandbox._linux.launcher import Channel

__all__ = ["MESSAGE_BYTES", "Sandbox", "close_all"]

MESSAGE_BYTES: Final = 512


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


class Sandbox:
    """A prepared sandbox: its socket, and what must happen when it has ended."""

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
        """The number of its first process on the host, where that was asked for."""
        self.number = number
        self.sock = sock
        self.channel = channel
        self.owner = owner
        """The id that must own what the command may reopen, such as its pipes."""
        self.was_out_of_memory: Callable[[], bool] = lambda: False
        self.peak_memory: Callable[[], int | None] = lambda: None
        self._pipes: list[tuple[int, int]] = []
        """For the output of a command to come: (near end, far end)."""

    def kill(self) -> None:
        if not self.channel.kill(self.number) and self.sock.fileno() >= 0:
            # The launcher has died, and nearly everything with it. One that was being made just
            # then lives on; it ends when it hears nothing from us any more.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def lay_pipes(self) -> None:
        """Ahead of a command, for both its streams."""
        for _ in (1, 2):
            self._pipes.append(self._new_pipe())

    def pipe(self) -> tuple[int, int]:
        """A pipe that is there already, or a new one; it is the caller's."""
        return self._pipes.pop() if self._pipes else self._new_pipe()

    def _new_pipe(self) -> tuple[int, int]:
        near, far = os.pipe2(os.O_CLOEXEC)
        try:
            fcntl.fcntl(near, fcntl.F_SETFL, os.O_NONBLOCK)
            if self.owner is not None:
                # So that the command can open /dev/stdout: it checks the owner of the pipe.
                os.fchown(far, self.owner, self.owner)
        except OSError:
            close_all((near, far))
            raise
        return near, far

    def drop_pipes(self) -> None:
        """Closes those that nobody has asked for."""
        while self._pipes:
            close_all(self._pipes.pop())

    def last_words(self) -> tuple[int, int, bytes] | None:
        """Of one that has ended: the step that failed, its errno, and what bwrap said."""
        with contextlib.suppress(OSError):
            while data := self.sock.recv(MESSAGE_BYTES):
                if (
                    int.from_bytes(data[:4], sys.byteorder) == Message.FAILED
                    and len(data) >= SIMPLE.size
                ):
                    _, where, error, _ = SIMPLE.unpack_from(data)
                    return where, error, data[SIMPLE.size :]
        return None

    def release(self) -> None:
        """Lets an unused sandbox go: its processes see that, and end."""
        self.sock.close()
        self.drop_pipes()
