"""Stop all processes that see a work dir, for the moment in which it is copied.

A stopped process can be continued by a signal that it has arranged itself, such as that of a timer.
So the copy counts only if no thread has run meanwhile: each time a thread leaves a processor, the
kernel counts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final, NamedTuple

__all__ = ["NotStoppedError", "StoppedProcesses"]

_WITHIN_S: Final = 5.0
"""A process that waits for a slow disk stops when the disk has answered."""
_PAUSE_S: Final = 0.0005
_MAX_PAUSE_S: Final = 0.01
_STOPPED: Final = frozenset("T")
_BLOCKED: Final = "D"
_GONE: Final = frozenset("ZX")
_SWITCHES: Final = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class NotStoppedError(Exception):
    """A process was not stopped in time, or has run meanwhile."""


class _Thread(NamedTuple):
    state: str
    switches: tuple[str, ...]


class StoppedProcesses:
    """All processes of the sandboxes of one session.

    These are the sandboxes that the caller names, and those with a process that shows the work dir:
    one that waits for a command. A process that may not be inspected has executed no program of the
    sandbox, or one of a sandbox that is named.

    Args:
        launcher: the pid of the process whose children are the first processes of sandboxes.
        firsts: those children that are known to belong to the session.
        path: the path of the work dir inside a sandbox.
        identity: device and inode of the work dir.

    """

    def __init__(
        self, launcher: int, firsts: frozenset[int], path: str, identity: tuple[int, int]
    ) -> None:
        self._launcher = launcher
        self._firsts = firsts
        self._path = path
        self._identity = identity
        self._pidfds: dict[int, int] = {}
        """Processes that were stopped here, by pid."""
        self._threads: dict[tuple[int, int], _Thread] = {}

    def stop(self) -> None:
        """Stop them; raises ``NotStoppedError`` if one still runs after 5 s. Blocks."""
        until = time.monotonic() + _WITHIN_S
        pause_s = _PAUSE_S
        last: dict[tuple[int, int], _Thread] | None = None
        while True:
            threads = self._look()
            running = {pid for (pid, _), found in threads.items() if found.state not in _STOPPED}
            if not running and threads == last:
                self._threads = threads
                return
            last = threads
            blocked = {pid for (pid, _), found in threads.items() if found.state == _BLOCKED}
            if blocked and pause_s == _MAX_PAUSE_S:
                self._continue_children(blocked)
            for pid in running:
                self._stop(pid)
            if time.monotonic() > until:
                raise NotStoppedError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def check(self) -> None:
        """Raise ``NotStoppedError`` unless no thread has run since ``stop()`` has returned."""
        if self._look() != self._threads:
            raise NotStoppedError

    def resume(self) -> None:
        """Continue the processes that were stopped here."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self._pidfds.clear()

    def _stop(self, pid: int) -> None:
        """Stop a process; also again, as one that was not stopped yet may have continued it."""
        pidfd = self._pidfds.get(pid, -1)
        if pidfd < 0:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            # Again: the number may be that of another process by now.
            if pid not in self._processes():
                os.close(pidfd)
                return
            self._pidfds[pid] = pidfd
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)

    def _continue_children(self, parents: set[int]) -> None:
        """Let the children of processes run until the next look.

        The parent of a vfork() stops only after its child has executed a program or ended.
        """
        for pid, pidfd in self._pidfds.items():
            if _parent(pid) in parents:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def _look(self) -> dict[tuple[int, int], _Thread]:
        """Return the threads of all these processes."""
        found: dict[tuple[int, int], _Thread] = {}
        for pid in self._processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for name in os.listdir(f"/proc/{pid}/task"):
                    thread = _thread(f"/proc/{pid}/task/{name}/status")
                    if thread.state not in _GONE:
                        found[pid, int(name)] = thread
        return found

    def _processes(self) -> set[int]:
        found: set[int] = set()
        for first in _children(self._launcher):
            tree = [first]
            for pid in tree:  # grows meanwhile
                tree += _children(pid)
            if first in self._firsts or any(map(self._shows_work_dir, tree)):
                found.update(tree)
        return found

    def _shows_work_dir(self, pid: int) -> bool:
        try:
            shown = os.stat(f"/proc/{pid}/root{self._path}")
        except OSError:
            return False
        return (shown.st_dev, shown.st_ino) == self._identity


def _thread(path: str) -> _Thread:
    with open(path, encoding="utf-8", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    switches = tuple(fields.get(name, "").strip() for name in _SWITCHES)
    if "" in switches:  # this kernel does not count
        raise NotStoppedError
    return _Thread(fields["State"].strip()[:1], switches)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
