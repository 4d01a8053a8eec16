"""A program with many idle sessions that tells, as JSON, what it holds at each step.

A process of its own, so that memory is that of the sessions alone and the limit on open files is
raised before the launcher starts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
from pathlib import Path

from tests.conftest import descendants, descriptors, eventually

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.spares import Budget
from union.sandbox.on_device import _sandboxes, _workdir

IDLE_S = 0.5


def resident_kib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def state(launcher: int) -> dict[str, object]:
    gc.collect()
    me = os.getpid()
    places = (*Path("/tmp").glob(f"sandbox-{me}-*"), *Path("/var/tmp").glob(f"sandbox-{me}-*"))
    return {
        "resident_kib": resident_kib(me) + resident_kib(launcher),
        "descriptors": descriptors(),
        "of_launcher": len(os.listdir(f"/proc/{launcher}/fd")),
        "processes": len(descendants(me)),
        "dirs": sum(place.is_dir() for place in places),
        "locks": sum(place.name.endswith(".lock") for place in places),
        "spares": Budget.held(),
    }


async def main(number: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # What killed processes of other tests have left is not this program's to remove.
    _workdir._swept.add(_workdir.default_parent())
    _sandboxes.IDLE_S = IDLE_S  # spares are released at once, not after their twenty seconds
    async with sb.on_device.session(backend="userns") as first:
        await first.exec("true")
    launcher = Launcher.current().pid
    # By then only the launcher is left below this process.
    await asyncio.to_thread(eventually, lambda: len(descendants(os.getpid())) == 1)
    states = {"before": state(launcher)}

    sessions = [await sb.on_device.session(backend="userns").open() for _ in range(number)]
    states["opened"] = state(launcher)
    await asyncio.to_thread(eventually, lambda: len(descendants(os.getpid())) == 1, within_s=60)
    states["idle"] = state(launcher)

    states["answers"] = [
        (await sessions[at].exec("echo $$ here")).stdout for at in (0, number // 2, -1)
    ]
    for session in sessions:
        await session.close()
    del sessions
    await asyncio.to_thread(eventually, lambda: len(descendants(os.getpid())) == 1)
    states["closed"] = state(launcher)
    print(json.dumps(states))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
