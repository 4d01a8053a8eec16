"""Kills and stops processes of the product at random moments: only ones below this process."""

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
    """Processes below a launcher by what they are; the command itself is not among them."""
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
    """Sends SIGKILL, or SIGSTOP and a little later SIGCONT or SIGKILL."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.excuses = Excuses()
        self._later: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=STOPS_AT_ONCE)
        # All of them begin now: threads are counted.
        barrier = threading.Barrier(STOPS_AT_ONCE)
        list(self._threads.map(lambda _: barrier.wait(), range(STOPS_AT_ONCE)))
        self.done: Counter[str] = Counter()
        self.unknown = 0
        """Kills of which nobody can say what session they hit: a sandbox that was half made."""

    @property
    def kills(self) -> int:
        """How many processes were killed; those that were only stopped for a while do not count."""
        return sum(n for role, n in self.done.items() if not role.endswith(STOPPED))

    def note(self, role: str) -> None:
        """Counts a kill that somebody else has made, of what no session here depends on."""
        self.done[role] += 1

    def strike(self, servers: Callable[[], dict[str, int]], endpoint: str) -> None:
        """Kills or stops one process of a random kind, if there is one."""
        found: dict[str, list[int]] = {}
        launcher = Launcher._current  # noqa: SLF001 - the soak looks inside
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
            # From now on: what notices the end may be faster than this task.
            self.excuses.add(Kill(role, time.monotonic() + wait_s, hit))
        # In a thread that begins now, and is nobody else's: what was stopped may be what the loop
        # itself, or whatever has all other threads, is about to wait for.
        return asyncio.get_running_loop().run_in_executor(self._threads, end)

    async def settle(self) -> None:
        """Waits until whatever is stopped goes on, or is dead."""
        while self._later:
            await asyncio.wait(self._later)


STOPPED = ", stopped for a while"


def _held(pid: int) -> int | None:
    """A handle of a process that is surely below this one."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    # Now that it is held, its number cannot pass to another: still below us, it is ours.
    if pid in descendants(os.getpid()):
        return handle
    os.close(handle)
    return None


def _work_dir(pid: int) -> str | None:
    """The work dir that a process of a sandbox sees; its mounts say where it is on the host."""
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
