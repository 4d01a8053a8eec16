"""A prepared sandbox: it waits for one command, with the pipes for that command's output."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import termios
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.protocol import SIMPLE, Message
from union.sandbox._linux.reports import Failure, MalformedReportError, decode_failed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from union.sandbox._core.events import Failed
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.machine import Machine

__all__ = ["MAX_MESSAGE", "NotBuiltError", "Sandbox", "kill_delay_s"]

_KILL_DELAY_S: Final = 2.0
_TREE_KILL_DELAY_S: Final = 20.0
MAX_MESSAGE: Final = 512
"""The largest message of a sandbox, in bytes."""


class NotBuiltError(BrokenPipeError):
    """The command could not be sent because its sandbox could not be built."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(errno.EPIPE, failed.reason)
        self.failed = failed


def kill_delay_s(isolation: Isolation) -> float:
    """Return how long a first process may take to end before it is killed from outside.

    Without a pid namespace it ends the processes of its tree one by one, which a fork bomb delays.
    Killed from outside, it would leave them to the launcher.
    """
    return _TREE_KILL_DELAY_S if isolation.backend == "landlock" else _KILL_DELAY_S


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
        self.was_out_of_memory: Callable[[], bool] | None = None
        self.saw_oom_kill: Callable[[], bool] = lambda: False
        """Whether the kernel killed a process for memory meanwhile, perhaps of another sandbox."""
        self.peak_memory: Callable[[], int | None] | None = None
        self.terminal: tuple[int, int] | None = None
        """The host's end of a terminal that was opened on the host, and its device."""
        self.variables: Mapping[str, str] = {}
        """Environment variables of the command that depend on this sandbox."""
        self.directory: str | None = None
        """A directory of this sandbox alone, to be removed after the command."""
        self.listeners: tuple[socket.socket, ...] = ()
        self.credentials = ""
        """Sockets of proxies on the host's loopback, and the ``user:password`` they require."""
        self.oom_kills: Callable[[], int] | None = None
        """Counts the processes of its machine that the kernel has killed for memory."""
        self.machine: Machine | None = None
        """The machine that its command joins."""
        self._label = 0
        self.waiting_pid = 0
        """The process that waits to become the command of a machine, by its number inside."""
        self._pipes: list[tuple[int, int]] = []
        """Created ahead for the output of the command: (near end, far end)."""

    def ran_out_of_memory(self, status: int) -> bool:
        """Return whether memory was the reason for an end with this status.

        A command that was killed has the status 128 + SIGKILL, as has a shell that waited for one.
        """
        if self.was_out_of_memory is not None and self.was_out_of_memory():
            return True
        return status == 128 + signal.SIGKILL and self.saw_oom_kill()

    def peak(self) -> int | None:
        """Return the peak memory of the command in bytes; None if nothing measures it."""
        return None if self.peak_memory is None else self.peak_memory()

    @property
    def label(self) -> int:
        """The number by which a machine finds the processes of the command; 0: there are none.

        The runner sends it before it can receive a command.
        """
        if not self._label and self.machine is not None and self.sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self.read_label(self.sock.recv(MAX_MESSAGE, socket.MSG_PEEK))
        return self._label

    def read_label(self, data: bytes) -> None:
        """Take the label from a READY message; other messages are ignored."""
        if len(data) == SIMPLE.size:
            kind, label, _, _ = SIMPLE.unpack(data)
            self._label = label if kind == Message.READY else self._label

    def read_waiting(self) -> int:
        """Return the pid inside that a command of a machine will have; 0 if it is not known yet.

        Not for a filtered network, whose first message carries descriptors.
        """
        with contextlib.suppress(OSError):
            while True:  # the last one: a process that was killed while it waited is replaced
                data = self.sock.recv(MAX_MESSAGE, socket.MSG_PEEK)
                kind = int.from_bytes(data[:4], sys.byteorder)
                if len(data) != SIMPLE.size or kind not in {Message.READY, Message.WAITING}:
                    break  # it has failed; sending the command reports that
                self.sock.recv(MAX_MESSAGE)
                self.read_label(data)
                if kind == Message.WAITING:
                    self.waiting_pid = SIMPLE.unpack(data)[2]
        return self.waiting_pid

    def kill(self) -> None:
        """Kill the sandbox from outside, by the launcher; in a machine, also what it has left."""
        if self.machine is not None and self.label:
            self.machine.signal(self.label, signal.SIGKILL)
        if not self.channel.kill(self.number) and self.sock.fileno() >= 0:
            # The launcher has died, and nearly everything with it. A sandbox that was being made
            # at that moment still runs; it ends when its socket is shut down.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def follow(self, pid: int) -> None:
        """Let the command end with another process of the sandbox.

        Args:
            pid: its process id inside; an orphan, which the first process waits for.

        """
        try:
            self.sock.send(SIMPLE.pack(Message.FOLLOW, 0, pid, 0))
        except BlockingIOError:  # the first process is stopped, and cannot follow another
            self.kill()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just ended; its report is about to be received

    def make_pipes(self) -> None:
        """Create the pipes for both output streams ahead of the command."""
        for _ in (1, 2):
            self._pipes.append(self._new_pipe())

    def pipe(self) -> tuple[int, int]:
        """Return a pipe, created ahead or now; the caller closes it."""
        return self._pipes.pop() if self._pipes else self._new_pipe()

    def _new_pipe(self) -> tuple[int, int]:
        near, far = os.pipe()
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

    def record_memory(self, exceeded: bool, peak: int) -> None:  # noqa: FBT001 - of a report
        """Record the memory that the portable launcher has measured."""
        self.was_out_of_memory = lambda: exceeded
        self.peak_memory = lambda: peak

    def connect_terminal(
        self, far_ends: dict[int, int], window: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Make the terminal that was opened on the host the standard streams of the command.

        Args:
            far_ends: receives three descriptors of the device, by their `ExecFlag`.
            window: rows and columns of the terminal.

        Returns:
            The host's end and the device, which become the caller's.

        """
        near, device = self.take_terminal()
        if window is not None:
            termios.tcsetwinsize(near, window)
        far_ends |= {1 << fd: os.dup(device) for fd in range(3)}
        return near, device

    def take_terminal(self) -> tuple[int, int]:
        """Hand over both descriptors of the terminal; the caller closes them."""
        if self.terminal is None:
            raise RuntimeError("the sandbox has no terminal")
        terminal, self.terminal = self.terminal, None
        return terminal

    def release(self) -> None:
        """Release an unused sandbox: its processes end when the socket is closed."""
        self.sock.close()
        self.close_pipes()
        if self.terminal is not None:
            close_all(self.take_terminal())
        for listener in self.listeners:
            listener.close()
