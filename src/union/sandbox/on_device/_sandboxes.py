"""Makes the sandboxes of one session, and keeps some ready."""

from __future__ import annotations

import asyncio
import errno
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from union.sandbox._linux import cgroup
from union.sandbox._linux.memory import MemoryWatch
from union.sandbox._linux.prepared import Sandbox
from union.sandbox._linux.run import LocalRun
from union.sandbox._linux.spares import IDLE_S, Budget
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._linux.channel import Channel
    from union.sandbox.on_device._posture import Posture

__all__ = ["Sandboxes"]

_AGAIN_S: Final = 0.02
_SELDOM_S: Final = 5.0
_GONE_WITHIN_S: Final = 10.0
"""For processes that were killed to leave their group, when no launcher is there to say so."""


class _Spare:
    """A prepared sandbox that waits; whoever claims its ticket owns it."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._ticket = Budget.add(run.discard)

    def let_go(self) -> None:
        if Budget.claim(self._ticket):
            self._run.discard()

    def take(self) -> LocalRun | None:
        """The run to be, if it is still ours; a sandbox that died takes no command, and says so."""
        return self._run if Budget.claim(self._ticket) else None


class Sandboxes:
    """Prepares sandboxes through a channel; ``keep`` of each posture are kept ready."""

    def __init__(self, line: Callable[[], Channel], *, keep: int) -> None:
        self._line = line
        self._keep = keep
        self._spares: defaultdict[Posture, deque[_Spare]] = defaultdict(deque)
        self._expiry: asyncio.TimerHandle | None = None
        self._also: Callable[[], None] | None = None
        self._closed = False
        self._watched: WeakSet[LocalRun] = WeakSet()
        self._held: set[cgroup.Group] = set()
        self._without_groups: asyncio.Future[None] | None = None

    def prepare(self, posture: Posture, *, terminals: bool = False) -> Sandbox:
        """Begins a sandbox now; once more with a new launcher if the old one has just died."""
        try:
            return self._prepare(posture, terminals=terminals)
        except (BrokenPipeError, ConnectionResetError):
            return self._prepare(posture, terminals=terminals)

    def _prepare(self, posture: Posture, *, terminals: bool) -> Sandbox:
        group = None
        if posture.groups is not None:
            group = cgroup.Group(posture.groups, posture.limits, own=posture.own_processes)
        pid: asyncio.Future[int] | None = None
        if group is None and posture.limits.memory_bytes is not None:
            pid = asyncio.get_running_loop().create_future()
        try:
            channel = self._line()
            number, sock = posture.prepare(
                channel,
                cgroups=group.procs if group else (),
                on_gone=None if group is None else lambda: self._remove(group),
                pid=pid,
                terminals=terminals,
            )
        except BaseException:
            if group is not None:
                group.release_procs()
                group.remove()
            raise
        sandbox = Sandbox(number, sock, channel=channel, owner=posture.owner, first_pid=pid)
        if group is not None:
            self._held.add(group)
            group.release_procs()
            sandbox.was_out_of_memory = group.was_out_of_memory
            sandbox.peak_memory = group.peak_memory
        return sandbox

    def take(self, posture: Posture) -> LocalRun:
        """A sandbox that is ready for a command, or one that is begun now."""
        waiting = self._spares[posture]
        while waiting:
            run = waiting.popleft().take()
            if run is not None:
                return run
        return self.begin(posture)

    def begin(self, posture: Posture, *, terminals: bool = False) -> LocalRun:
        """The same, always begun now."""
        sandbox = self.prepare(posture, terminals=terminals)
        return LocalRun(sandbox, isolation=posture.isolation)

    def fill(self, posture: Posture) -> None:
        """Has as many ready for next time as are wanted."""
        while len(self._spares[posture]) < self._keep and not self._closed:
            self.keep(posture, self.prepare(posture))

    def keep(self, posture: Posture, sandbox: Sandbox) -> None:
        """Keeps this one for next time, unless there are enough."""
        waiting = self._spares[posture]
        if self._closed or len(waiting) >= self._keep:
            sandbox.release()
            return
        try:
            sandbox.make_pipes()
        except OSError:
            sandbox.release()
            raise
        waiting.append(_Spare(LocalRun(sandbox, isolation=posture.isolation)))
        self.touch()

    @property
    def is_open(self) -> bool:
        return not self._closed

    def touch(self, also: Callable[[], None] | None = None) -> None:
        """The session is in use: what waits may wait longer, until ``also`` is called too."""
        self._also = also or self._also
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self._expire)

    def _expire(self) -> None:
        self.let_go()
        if self._also is not None:
            self._also()

    def let_go(self) -> None:
        """Lets every spare go."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for waiting in self._spares.values():
            while waiting:
                waiting.popleft().let_go()
        self._spares.clear()

    def close(self) -> None:
        self._closed = True
        self.let_go()

    def without_groups(self, *, patience_s: float | None = None) -> asyncio.Future[None]:
        """Done when the last control group is removed, or with an error if that does not happen."""
        loop = asyncio.get_running_loop()
        done = self._without_groups = loop.create_future()
        if self._held:
            wait_s = _GONE_WITHIN_S if patience_s is None else patience_s
            patience = loop.call_later(wait_s, self._give_up, done)
            done.add_done_callback(lambda _: patience.cancel())
        else:
            done.set_result(None)
        return done

    def _give_up(self, done: asyncio.Future[None]) -> None:
        if done.done():
            return
        paths = ", ".join(sorted(path for group in self._held for path in group.paths))
        done.set_exception(
            SandboxExecutionError(
                f"processes of the session are still there although they were killed; control "
                f"groups left: {paths}",
                stage="stream",
                code="close-incomplete",
                hint="cgroup.procs in these directories lists the processes; one in state D waits "
                "for a device or a network file system",
            )
        )

    def _remove(self, group: cgroup.Group, after_s: float = _AGAIN_S) -> None:
        """Removes a group whose processes are gone, or soon will be if the launcher died."""
        try:
            group.remove()
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            loop = asyncio.get_running_loop()
            loop.call_later(after_s, self._remove, group, min(after_s * 1.1, _SELDOM_S))
            return
        self._held.discard(group)
        if not self._held and self._without_groups and not self._without_groups.done():
            self._without_groups.set_result(None)

    def watch_memory(self, run: LocalRun, limit: int | None) -> None:
        """Enforces the memory limit by looking, where there is no control group to do it."""
        sandbox = run.sandbox
        if sandbox.first_pid is None or limit is None or run in self._watched:
            return
        self._watched.add(run)

        def begin(found: asyncio.Future[int]) -> None:
            if run.finished.done() or found.exception() is not None:
                return
            watch = MemoryWatch(found.result(), limit, run.kill_tree)
            sandbox.was_out_of_memory = lambda: watch.exceeded
            sandbox.peak_memory = lambda: watch.peak
            run.finished.add_done_callback(lambda _: watch.stop())

        sandbox.first_pid.add_done_callback(begin)
