"""One command of a machine: what it leaves behind goes on when it ends.

The runner that reports the end of the command is outside the machine. Signals to the command's
processes are sent by the first process inside, which finds all of them. A command that the host
ends takes everything along that it has started.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Exited, Failed, Started
from union.sandbox._linux.protocol import Message
from union.sandbox._linux.reports import decode_started
from union.sandbox._linux.run import LocalRun

if TYPE_CHECKING:
    import asyncio

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._linux.machine import Machine
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox._session.transport import Sink

__all__ = ["MachineRun", "announce", "new_run"]

_log = logging.getLogger("union.sandbox")
_RETRY_S: Final = 0.1
_FIRST_INSIDE: Final = 2
"""The pid of a command in its own pid namespace, next to the sandbox's first process."""


def new_run(sandbox: Sandbox, *, isolation: Isolation) -> LocalRun:
    """Return a run for a prepared sandbox, which may join a machine."""
    if sandbox.machine is None:
        return LocalRun(sandbox, isolation=isolation)
    return MachineRun(sandbox, sandbox.machine, isolation=isolation)


class MachineRun(LocalRun):
    """A command in a machine."""

    def __init__(self, sandbox: Sandbox, machine: Machine, *, isolation: Isolation) -> None:
        super().__init__(sandbox, isolation=isolation)
        self._machine = machine
        self._ends_tree = False
        """Whether the host has killed the command, and so all of its processes."""
        self._is_swept = False
        self._is_announced = False
        """Whether the start was reported: by the command, or with the pid that waited for it."""
        self.keeps_network = False
        """Whether processes that the command leaves behind keep its network."""

    def attach(self, sink: Sink, *, timeout_s: float | None) -> None:
        """Begin to receive reports; see ``LocalRun``."""
        kills = self.sandbox.oom_kills
        if kills is not None:
            # The control group is the machine's: only kills during this command can concern it.
            before = kills()
            self.sandbox.saw_oom_kill = lambda: kills() > before
        super().attach(sink, timeout_s=timeout_s)

    def announce(self) -> None:
        """Report the pid of the command as its start, if it is known and was not reported.

        A run starts once. If the process that waited was killed before it took its request, the
        reported pid is the one of that process, not the one of its replacement.
        """
        pid = self.sandbox.waiting_pid
        if pid and not self._is_announced:
            self._is_announced = True
            self._sink.event(Started(pid))

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to every process of the command, or only to its own process group."""
        label = 0 if group or self.has_ended else self.sandbox.label
        # Without a label the sandbox is still being made. Its runner then ends the command, which
        # may have started others by that time.
        self._ends_tree |= signum == signal.SIGKILL and not group
        if label:
            self._machine.signal(label, signum)
        if label and signum != signal.SIGKILL:
            return
        # The runner too: it replaces a process that was killed before it took its request.
        super().signal(signum, group=group)
        if label:
            return
        if signum == signal.SIGKILL and not group and not self.has_ended:
            again = self._loop.call_later(_RETRY_S, self.signal, signum)
            self._timers.append(again)

    def end_now(self, cause: str) -> None:
        """Kill all processes of the command without a grace period."""
        if self.has_ended or not self.sandbox.label:
            super().end_now(cause)
            return
        self._cause = self._cause or cause
        self._shut_listeners()
        self.kill_tree()  # its runner reports the end when all of them are gone

    def _on_started(self, pid: int) -> None:
        self.sandbox.waiting_pid = pid
        self.announce()

    def _dispatch(self, kind: int, data: bytes) -> None:
        if kind == Message.WAITING:
            self.sandbox.waiting_pid = decode_started(data)
            return
        if kind == Message.EXITED:
            self.announce()
        if kind != Message.EXITED or self._is_swept or not (self._cause or self._ends_tree):
            super()._dispatch(kind, data)
            return
        self._is_swept = True
        swept = self._machine.signal(self.sandbox.label, signal.SIGKILL)
        swept.add_done_callback(lambda done: self._on_swept(done, data))

    def _on_swept(self, done: asyncio.Future[int], data: bytes) -> None:
        if done.result():
            # Better to lose the machine than to leave a process that a timeout should have ended.
            _log.error("processes of a command cannot be killed; the machine is ended")
            self._machine.end()
        if not self.has_ended:
            super()._dispatch(Message.EXITED, data)

    def _drain_output(self) -> None:
        if self._terminal is not None:
            super()._drain_output()
        else:
            self.output.leave(self._machine.left_output.add)

    def _on_lost(self) -> None:
        if self._is_swept:  # the runner has ended after its report
            self._readers.remove(self.sandbox.sock.fileno())
            return
        self.sandbox.kill()  # the runner was killed, and its command goes on
        super()._on_lost()

    def _finish(self, end: Exited | Failed) -> None:
        keeps = self.keeps_network and isinstance(end, Exited) and not self._cause
        if keeps and self.close_listeners is not None:
            self._machine.keep_network(self.sandbox.label, self.close_listeners)
            self.close_listeners = None
        super()._finish(end)


def announce(run: LocalRun, sink: Sink) -> None:
    """Report the pid of a command that reports no start itself."""
    if isinstance(run, MachineRun):
        run.announce()
    elif run.started is None:
        sink.event(Started(_FIRST_INSIDE))
