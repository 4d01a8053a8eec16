"""What a process holds on this machine: memory, descriptors, threads, processes, groups, dirs."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TypedDict

__all__ = [
    "State",
    "children_of",
    "descendants",
    "groups_of",
    "left_by",
    "measure",
    "started_at",
]

PLACES = ("/tmp", "/var/tmp")
GROUPS = Path("/sys/fs/cgroup")


class State(TypedDict):
    """Levels of one process; each must be the same after a round as before it."""

    resident_kib: int
    descriptors: int
    threads: int
    processes: int
    mounts: int
    groups: int
    dirs: int


def children_of(pid: int) -> set[int]:
    """The processes that ``pid`` has started and not waited for, whatever thread did."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found |= set(
                map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()),
            )
    except OSError:
        pass  # it ended while we looked
    return found


def descendants(pid: int) -> set[int]:
    """Every process below ``pid``."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = children_of(waiting.pop()) - found
        found |= fresh
        waiting.extend(fresh)
    return found


def started_at(pid: int) -> str | None:
    """What tells a process from a later one with its number; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


def groups_of(pid: int) -> list[str]:
    """Control groups that a process has made for its sandboxes."""
    # Groups come and go while this looks, which os.walk takes as it is.
    return [
        os.path.join(place, name)
        for place, names, _ in os.walk(GROUPS)
        for name in names
        if name.startswith(f"sandbox-{pid}-")
    ]


def dirs_of(pid: int) -> list[str]:
    """Work dirs that a process has made for its sessions."""
    found = (path for place in PLACES for path in Path(place).glob(f"sandbox-{pid}-*"))
    # Each has a marker beside it, which goes last and so is counted once the dir is gone.
    return [str(path) for path in found if path.is_dir() or not _is_marker_of_a_dir(path)]


def _is_marker_of_a_dir(path: Path) -> bool:
    return path.suffix == ".lock" and path.with_suffix("").is_dir()


def left_by(pid: int) -> list[str]:
    """What a process that has ended should not have left."""
    return groups_of(pid) + dirs_of(pid)


def measure(sandboxes: set[int]) -> State:
    """The levels of this process, and of the sandboxes below the launchers ``sandboxes``."""
    gc.collect()
    me = os.getpid()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return State(
        resident_kib=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        descriptors=len(os.listdir("/proc/self/fd")) - 1,
        threads=threading.active_count(),
        processes=sum(len(descendants(pid)) for pid in sandboxes),
        mounts=Path("/proc/self/mountinfo").read_text().count("\n"),
        groups=len(groups_of(me)),
        dirs=len(dirs_of(me)),
    )
