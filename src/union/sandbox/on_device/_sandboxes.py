"""Prepare the sandboxes of one session and keep some of them ready."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from union.sandbox._linux import cgroup
from union.sandbox._linux.machine_run import new_run
from union.sandbox._linux.memory import MemoryWatch
from union.sandbox._linux.prepared import Sandbox
from union.sandbox._linux.spares import IDLE_S, Budget
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._posture import Posture

__all__ = ["Sandboxes"]

_RETRY_S: Final = 0.02
_OWN_IN_MACHINE: Final = 128
"""Processes of our own in the control group of a machine: two for each command and each spare."""
_MAX_RETRY_S: Final = 5.0
_REMOVAL_TIMEOUT_S: Final = 10.0
"""How long killed processes may take to leave their control group after the launcher died."""


class _Spare:
    """A prepared sandbox without a command; its ticket in the budget is claimed exactly once."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self._ticket = Budget.add(run.discard)

    def release(self) -> None:
        if Budget.claim(self._ticket):
            self.run.discard()

    def take(self) -> LocalRun | None:
        """Return the run, or None if the budget has discarded it."""
        return self.run if Budget.claim(self._ticket) else None


class Sandboxes:
    """Prepare sandboxes through a channel and keep ``keep`` of each posture ready."""

    def __init__(self, channel: Callable[[], Channel], *, keep: int) -> None:
        self._channel = channel
        self._keep = keep
        self._spares: defaultdict[Posture, deque[_Spare]] = defaultdict(deque)
        self._expiry: asyncio.TimerHandle | None = None
        self._expires_at = 0.0
        self.on_idle: Callable[[], None] | None = None
        """Called when no command has used the sandboxes for a while."""
        self._on_expiry: Callable[[], None] | None = None
        self._closed = False
        self._watched: WeakSet[LocalRun] = WeakSet()
        self._groups: set[cgroup.Group] = set()
        self._machine_group: cgroup.Group | None = None
        self._groups_removed: asyncio.Future[None] | None = None

    def prepare(self, posture: Posture, *, terminals: bool = False, template: int = 0) -> Sandbox:
        """Prepare a sandbox now; retry once with a new launcher if the old one has just died."""
        try:
            return self._prepare(posture, terminals=terminals, template=template)
        except (BrokenPipeError, ConnectionResetError):
            if template:
                raise  # it has died with the launcher
            return self._prepare(posture, terminals=terminals, template=0)

    def _prepare(self, posture: Posture, *, terminals: bool, template: int) -> Sandbox:
        group = None
        shared = self._group_of_machine(posture)
        if posture.groups is not None and shared is None:
            group = cgroup.Group(posture.groups, posture.limits, own=posture.own_processes)
        joined = group if shared is None else shared
        pid: asyncio.Future[int] | None = None
        if joined is None and posture.polls_memory:
            pid = asyncio.get_running_loop().create_future()
        try:
            channel = self._channel()
            number, sock = posture.prepare(
                channel,
                cgroups=joined.procs if joined is not None else (),
                on_gone=None if group is None else lambda: self._remove(group),
                pid=pid,
                terminals=terminals,
                template=template,
            )
        except BaseException:
            if group is not None:
                group.release_procs()
                group.remove()
            raise
        sandbox = Sandbox(number, sock, channel=channel, owner=posture.owner, first_pid=pid)
        posture.equip(sandbox)
        if shared is not None:
            sandbox.oom_kills = shared.kills
        if group is not None:
            self._groups.add(group)
            group.release_procs()
            sandbox.was_out_of_memory = group.was_out_of_memory
            sandbox.peak_memory = group.peak_memory
        return sandbox

    def _group_of_machine(self, posture: Posture) -> cgroup.Group | None:
        """Return the control group that all commands of a machine are in, if they need one."""
        if posture.groups is None or not posture.view.machine:
            return None
        if self._machine_group is None:
            limits = posture.limits
            of_all = dataclasses.replace(limits, processes=limits.session_processes)
            self._machine_group = cgroup.Group(posture.groups, of_all, own=_OWN_IN_MACHINE)
            self._groups.add(self._machine_group)
        return self._machine_group

    def release_machine_group(self) -> None:
        """Remove the control group of a machine that has ended."""
        if self._machine_group is not None:
            self._machine_group.release_procs()
            self._remove(self._machine_group)
            self._machine_group = None

    def take(self, posture: Posture) -> LocalRun:
        """Return a spare sandbox, or prepare one now."""
        waiting = self._spares[posture]
        while waiting:
            run = waiting.popleft().take()
            if run is not None:
                return run
        return self.begin(posture)

    def begin(self, posture: Posture, *, terminals: bool = False) -> LocalRun:
        """Prepare a sandbox now, without using a spare."""
        sandbox = self.prepare(posture, terminals=terminals)
        return new_run(sandbox, isolation=posture.isolation)

    def fill(self, posture: Posture) -> None:
        """Prepare spares up to the number to keep."""
        while len(self._spares[posture]) < self._keep and not self._closed:
            self.keep(posture, self.prepare(posture))

    def keep(self, posture: Posture, sandbox: Sandbox) -> None:
        """Keep this sandbox as a spare, or release it if there are enough."""
        waiting = self._spares[posture]
        if self._closed or len(waiting) >= self._keep:
            sandbox.release()
            return
        try:
            sandbox.make_pipes()
        except OSError:
            sandbox.release()
            raise
        waiting.append(_Spare(new_run(sandbox, isolation=posture.isolation)))
        self.touch()

    def waiting(self) -> list[LocalRun]:
        """Return the spares of all postures."""
        return [spare.run for waiting in self._spares.values() for spare in waiting]

    @property
    def is_open(self) -> bool:
        return not self._closed

    def touch(self, on_expiry: Callable[[], None] | None = None) -> None:
        """Restart the idle timer; ``on_expiry`` is called in addition when it expires."""
        self._on_expiry = on_expiry or self._on_expiry
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + IDLE_S
        if self._expiry is None:  # a timer that runs already is prolonged when it is due
            self._expiry = loop.call_at(self._expires_at, self._expire)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._expires_at:
            self._expiry = loop.call_at(self._expires_at, self._expire)
            return
        self.release()
        if self._on_expiry is not None:
            self._on_expiry()
        if self.on_idle is not None:
            self.on_idle()

    def release(self) -> None:
        """Release every spare."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for waiting in self._spares.values():
            while waiting:
                waiting.popleft().release()
        self._spares.clear()

    def close(self) -> None:
        self._closed = True
        self.release()

    def groups_removed(self, *, timeout_s: float | None = None) -> asyncio.Future[None]:
        """Return a future that completes when the last control group is removed, or fails."""
        loop = asyncio.get_running_loop()
        done = self._groups_removed = loop.create_future()
        if self._groups:
            wait_s = _REMOVAL_TIMEOUT_S if timeout_s is None else timeout_s
            timer = loop.call_later(wait_s, self._time_out, done)
            done.add_done_callback(lambda _: timer.cancel())
        else:
            done.set_result(None)
        return done

    def _time_out(self, done: asyncio.Future[None]) -> None:
        if done.done():
            return
        paths = ", ".join(sorted(path for group in self._groups for path in group.paths))
        done.set_exception(
            SandboxExecutionError(
                f"killed processes of the session are still there; control groups left: {paths}",
                stage="stream",
                code="close-incomplete",
                hint="cgroup.procs in these directories lists the processes; one in state D waits "
                "for a device or a network file system",
            )
        )

    def _remove(self, group: cgroup.Group, after_s: float = _RETRY_S) -> None:
        """Remove a group; retry while its processes, killed with the launcher, still exit."""
        try:
            group.remove()
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            loop = asyncio.get_running_loop()
            loop.call_later(after_s, self._remove, group, min(after_s * 1.1, _MAX_RETRY_S))
            return
        self._groups.discard(group)
        if not self._groups and self._groups_removed and not self._groups_removed.done():
            self._groups_removed.set_result(None)

    def watch_memory(self, run: LocalRun, limit: int | None) -> None:
        """Enforce the memory limit by polling, where no control group does."""
        sandbox = run.sandbox
        if sandbox.first_pid is None or limit is None or run in self._watched:
            return
        self._watched.add(run)

        def begin(found: asyncio.Future[int]) -> None:
            if run.finished.done() or found.exception() is not None:
                return
            watch = MemoryWatch(found.result(), limit, run.kill_tree)
            sandbox.was_out_of_memory = lambda: watch.exceeded
            # The kernel may be faster, where a limit holds for this whole process and its children.
            kills = cgroup.oom_kills()
            sandbox.saw_oom_kill = lambda: cgroup.oom_kills() > kills
            sandbox.peak_memory = lambda: watch.peak
            run.finished.add_done_callback(lambda _: watch.stop())

        sandbox.first_pid.add_done_callback(begin)
