"""Cost of idle sessions: memory and processes, measured from outside."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contenders import OURS, Contender, ContenderError, Worker

if TYPE_CHECKING:
    from bench.measures import Note

EXPIRED_S = 22.0
"""After this time a session has released its prepared sandboxes."""
SIZES = (1, 100, 1000)
MOST_OF_PEERS = 100
"""Limit for peers, whose sessions would take minutes to open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Memory and processes of a process tree."""

    mib: float
    processes: int


def tree(root: int) -> Tree:
    """Measure a process and all its descendants."""
    found, waiting = [root], [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return Tree(mib=sum(map(memory_mib, found)), processes=len(found))


def children(pid: int) -> list[int]:
    """Return the children of a process, of all its threads."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    except (FileNotFoundError, ProcessLookupError):
        return found  # It has just ended.
    return found


def memory_mib(pid: int) -> float:
    """Return the proportional set size: private pages plus the share of shared pages."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except PermissionError:
        # An ordinary user may not inspect the sandbox: count all its pages, shared or not.
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # It has just ended.
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


async def hold(contender: Contender, sessions: int) -> tuple[Worker, dict[str, Any]]:
    """Open sessions in a separate process, and measure immediately."""
    idle = replace(contender, options=contender.options | {"idle": True})
    worker = await Worker(idle).start()
    try:
        before = tree(worker.pid)
        taken = await worker.seconds("hold", times=sessions)
        found = {
            "contender": contender.name,
            "sessions": sessions,
            "open_ms": round(statistics.median(taken) * 1000, 2),
            "before": before,
            "opened": _added(before, tree(worker.pid), sessions),
        }
    except BaseException:
        await worker.close()
        raise
    return worker, found


def _added(before: Tree, now: Tree, sessions: int) -> dict[str, float]:
    return {
        "mib_each": round((now.mib - before.mib) / sessions, 3),
        "processes": now.processes - before.processes,
    }


def sizes(contender: Contender, *, scale: float) -> list[int]:
    """Return the numbers of sessions to hold: 1, 100 and 1,000, depending on the contender."""
    most = SIZES[-1] if contender.name == OURS else MOST_OF_PEERS
    return [size for size in SIZES if size <= max(1, most * scale)]


async def idle_sessions(contenders: list[Contender], *, scale: float, note: Note) -> dict[str, Any]:
    """Measure idle sessions of each contender: just opened and, in a full run, after 20 seconds."""
    held: list[tuple[Worker, dict[str, Any]]] = []
    dropped: dict[str, str] = {}
    try:
        for contender in contenders:
            for size in sizes(contender, scale=scale):
                note(f"{contender.name}: {size}")
                try:
                    held.append(await hold(contender, size))
                except ContenderError as exc:
                    dropped[contender.name] = str(exc)
                    break
        opened = time.monotonic()
        while scale >= 1 and (left := opened + EXPIRED_S - time.monotonic()) > 0:
            note(f"{left:.0f} s until prepared sandboxes are released")
            await asyncio.sleep(min(1.0, left))
        for worker, found in held:
            before = found.pop("before")
            if scale >= 1:
                found["idle"] = _added(before, tree(worker.pid), found["sessions"])
    finally:
        for worker, _ in held:
            await worker.close()
    return {"results": [found for _, found in held], "dropped": dropped}


CONTEXTS = 1000
HALF = 0.5
"""From this scale on, the number of contexts is complete."""
KERNELS = 2


async def held_contexts(
    ours: Contender, bare: Contender, *, scale: float, note: Note
) -> list[dict[str, Any]]:
    """Measure contexts with pandas preloaded, open at once in one session, next to ipykernel."""
    found: list[dict[str, Any]] = []
    wanted = CONTEXTS if scale >= HALF else max(1, round(CONTEXTS * scale))
    for contender, most in ((ours, wanted), (bare, KERNELS)):
        note(f"{contender.name}: {most} contexts")
        held = {"idle": True, "holds_contexts": True} if contender is ours else {}
        worker = await Worker(replace(contender, options=contender.options | held)).start()
        try:
            if "hold_contexts" not in worker.operations:
                continue
            await worker.seconds("hold_contexts")  # what all of them share
            before = tree(worker.pid)
            taken = await worker.seconds("hold_contexts", times=most)
            added = _added(before, tree(worker.pid), most)
            found.append(
                {
                    "contender": contender.name,
                    "contexts": most,
                    "open_ms": round(statistics.median(taken) * 1000, 2),
                    **added,
                }
            )
        finally:
            await worker.close()
    return found
