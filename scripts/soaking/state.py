"""Resources of a process: memory, descriptors, threads, processes, control groups, directories."""

from __future__ import annotations

import ctypes
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


NAMESPACES_KEPT = 16
"""The launcher's client keeps at most this many user namespaces, one for each recent owner."""


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
    """Return the children of ``pid``, of all its threads, including zombies."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found |= set(
                map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()),
            )
    except OSError:
        pass  # It has just ended.
    return found


def descendants(pid: int) -> set[int]:
    """Return every descendant of ``pid``."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = children_of(waiting.pop()) - found
        found |= fresh
        waiting.extend(fresh)
    return found


def started_at(pid: int) -> str | None:
    """Return the start time of a process, to detect a reused pid; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


def groups_of(pid: int) -> list[str]:
    """Return the control groups that a process has created for its sandboxes."""
    # Groups may appear and disappear meanwhile; os.walk ignores that.
    return [
        os.path.join(place, name)
        for place, names, _ in os.walk(GROUPS)
        for name in names
        if name.startswith(f"sandbox-{pid}-")
    ]


def dirs_of(pid: int) -> list[str]:
    """Return the work dirs that a process has created for its sessions."""
    found = (path for place in PLACES for path in Path(place).glob(f"sandbox-{pid}-*"))
    # Each has a marker file, which is removed last and so counts only once the dir is gone.
    return [str(path) for path in found if path.is_dir() or not _is_marker_of_a_dir(path)]


def _is_marker_of_a_dir(path: Path) -> bool:
    return path.suffix == ".lock" and path.with_suffix("").is_dir()


def left_by(pid: int) -> list[str]:
    """Return the leftovers of an ended process."""
    return groups_of(pid) + dirs_of(pid)


def _descriptors() -> int:
    """Open files of this process, without the user namespaces that are kept for later sessions."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the directory that is being listed
            continue
    kept = sum(link.startswith("user:") for link in links)
    return len(links) - min(kept, NAMESPACES_KEPT)


def _trim() -> None:
    """Return the free memory of all arenas to the kernel: what stays resident is in use.

    Otherwise a hundred threads, each with an arena that grows in steps, would look like a leak.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # A function of glibc.
        trim(0)


def measure(sandboxes: set[int]) -> State:
    """Return the levels of this process, and of the sandboxes below the given launchers."""
    gc.collect()
    _trim()
    me = os.getpid()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return State(
        resident_kib=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        descriptors=_descriptors(),
        threads=threading.active_count(),
        processes=sum(len(descendants(pid)) for pid in sandboxes),
        mounts=Path("/proc/self/mountinfo").read_text().count("\n"),
        groups=len(groups_of(me)),
        dirs=len(dirs_of(me)),
    )
