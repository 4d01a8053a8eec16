"""Kill and stop processes of the product at random moments; only descendants of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.soaking.excuses import SANDBOX, SERVER, Excuses, Kill
from scripts.soaking.state import children_of, descendants

from union.sandbox._linux.launcher import BINARY, Launcher

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["Killer", "targets_below"]

STOPPED_S = (0.01, 0.3)
STOPS_AT_ONCE = 8


def targets_below(launcher: int) -> dict[str, list[int]]:
    """Return the processes below a launcher by role, without the commands."""
    found: dict[str, list[int]] = {"spare": [], "waiting python": [], "first process": []}
    found["bwrap"] = []
    for top in children_of(launcher):
        tree = {pid: _program(pid) for pid in (top, *descendants(top))}
        ours = [pid for pid, program in tree.items() if program == "ours"]
        found["bwrap"] += [pid for pid, program in tree.items() if program == "bwrap"]
        others = [pid for pid, program in tree.items() if program == "other"]
        if any(os.path.exists(f"/proc/{pid}/fd/100") for pid in others):
            found["waiting python"] += others
        elif others:
            found["first process"] += ours
        else:
            found["spare"] += ours
    return {role: pids for role, pids in found.items() if pids}


def _program(pid: int) -> str:
    try:
        if os.path.samefile(f"/proc/{pid}/exe", BINARY):
            return "ours"
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return "gone"
    return "bwrap" if name == "bwrap" else "other"


class Killer:
    """Send SIGKILL, or SIGSTOP and later SIGCONT or SIGKILL."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.excuses = Excuses()
        self._later: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=STOPS_AT_ONCE)
        # All threads start now, because threads are counted.
        barrier = threading.Barrier(STOPS_AT_ONCE)
        list(self._threads.map(lambda _: barrier.wait(), range(STOPS_AT_ONCE)))
        self.done: Counter[str] = Counter()
        self.unknown = 0
        """Kills of incomplete sandboxes, whose session is unknown."""

    @property
    def kills(self) -> int:
        """Return the number of killed processes, without those that were only stopped."""
        return sum(n for role, n in self.done.items() if not role.endswith(STOPPED))

    def note(self, role: str) -> None:
        """Count a kill by another part of the soak that affects no local session."""
        self.done[role] += 1

    def strike(self, servers: Callable[[], dict[str, int]], endpoint: str) -> None:
        """Kill or stop one process of a random role, if there is one."""
        found: dict[str, list[int]] = {}
        launcher = Launcher._current  # noqa: SLF001 - the soak needs internals
        if launcher is not None and launcher.is_usable():
            found = {**targets_below(launcher.pid), "launcher": [launcher.pid]}
        for name, pid in servers().items():
            found[name] = [pid]
        if not found:
            return
        roles = sorted(found)
        weights = [1 if role.startswith("server") else 3 for role in roles]
        role = self._chance.choices(roles, weights)[0]
        pid = self._chance.choice(sorted(found[role]))
        how = self._chance.choices(("kill", "stop", "stop and kill"), (7, 2, 1))[0]
        handle = _held(pid)
        if handle is None:
            return
        hit = endpoint if role.startswith(SERVER) else _work_dir(pid) if role in SANDBOX else None
        if role in SANDBOX and hit is None:
            self.unknown += 1
        sent = _send(handle, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "kill" or not sent:
            os.close(handle)
        else:
            later = self._end_stop(handle, role, hit, final=how == "stop and kill")
            self._later.add(later)
            later.add_done_callback(self._later.discard)
        if sent and how == "kill":
            self.excuses.add(Kill(role, time.monotonic(), hit))
        if sent:
            self.done[role + STOPPED if how == "stop" else role] += 1

    def _end_stop(
        self, handle: int, role: str, hit: str | None, *, final: bool
    ) -> asyncio.Future[None]:
        wait_s = self._chance.uniform(*STOPPED_S)

        def end() -> None:
            time.sleep(wait_s)
            _send(handle, signal.SIGKILL if final else signal.SIGCONT)
            os.close(handle)

        if final:
            # Recorded before the signal, because the effect may be noticed first.
            self.excuses.add(Kill(role, time.monotonic() + wait_s, hit))
        # In a dedicated thread: the event loop, or all other threads, may be about to wait for
        # the stopped process.
        return asyncio.get_running_loop().run_in_executor(self._threads, end)

    async def settle(self) -> None:
        """Wait until every stopped process continues, or is dead."""
        while self._later:
            await asyncio.wait(self._later)


STOPPED = ", stopped for a while"


def _held(pid: int) -> int | None:
    """Return a pidfd of a process that is certainly a descendant of this one."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    # The pidfd keeps the pid from being reused, so a descendant now is the right process.
    if pid in descendants(os.getpid()):
        return handle
    os.close(handle)
    return None


def _work_dir(pid: int) -> str | None:
    """Return the work dir of a sandboxed process on the host, from its mounts."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return None
    found = set(re.findall(rf"/(sandbox-{os.getpid()}-[^/ ]+)", text))
    return found.pop() if len(found) == 1 else None


def _send(handle: int, signum: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signum)
        return True
    return False
