"""Memory limits where there is no control group: the tree's memory is looked at often.

An address-space limit is no substitute: it breaks programs that map much and use little, and does
not add up over processes. Counted are private memory, shared memory, swap, and the files of the
sandbox's own mounts in memory. The system-call filter refuses memory that belongs to no process
and to no mount. Allocations between two looks are seen late; pages of a shared mapping that its
processes have unmapped are not seen.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._plan.rootfs import OWN_MOUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["MemoryWatch", "tree_memory"]

_EVERY_S: Final = 0.03
_OFTEN_S: Final = 0.01
"""The interval of a tree that has more than half of what it may have."""
_SHARE: Final = 8
"""Looking takes at most one part in so many of the event loop's time."""
_MAX_PROCESSES: Final = 4096
_KIB: Final = 1024
_RESIDENT: Final = ("RssAnon", "RssShmem", "VmSwap")


class _Process(NamedTuple):
    task: str
    """A directory in /proc of a thread that still has the process's memory."""
    group: int
    """A number that all threads of the process have."""
    bytes: int
    shared: int
    """How many of them are shared memory."""


def tree_memory(first: int, limit: int | None = None) -> int:
    """Bytes of memory of a process, all its descendants, and the mounts that are theirs.

    Shared pages count once for each process. If that exceeds ``limit``, they are divided among
    their processes, which takes longer and is exact.
    """
    processes = list(_tree(first))
    mounts = _mounted(processes)
    files = sum(mounts.values())
    total = files + sum(process.bytes for process in processes)
    if limit is None or total <= limit:
        return total
    devices = frozenset(mounts)
    if not os.path.exists("/proc/self/smaps_rollup"):
        return files + _by_mapping(processes, devices)
    return files + sum(_proportional(process, devices) for process in processes)


def _tree(first: int) -> Iterable[_Process]:
    waiting, seen = [first], {first}
    found: dict[int, _Process] = {}
    for _ in range(_MAX_PROCESSES):
        if not waiting:
            break
        pid = waiting.pop()
        process: _Process | None = None
        for task in _tasks(pid):
            place = f"/proc/{pid}/task/{task}"
            try:
                # A thread that has ended has no memory any more, though its process may.
                process = process or _resident(place)
                children = Path(place, "children").read_text(encoding="ascii")
            except OSError:
                continue  # it ended while we looked
            fresh = set(map(int, children.split())) - seen
            seen |= fresh
            waiting.extend(fresh)
        if process is not None:
            # gVisor lists all threads as children, so that a process is found more than once.
            found.setdefault(process.group, process)
    return found.values()


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        # It ended while we looked; or, in gVisor, its first thread has ended.
        return [str(pid)]


def _resident(place: str) -> _Process | None:
    fields = _fields(f"{place}/status", (*_RESIDENT, "VmRSS", "Tgid"))
    whole, group = fields.pop("VmRSS", None), fields.pop("Tgid", 0)
    if "RssAnon" in fields:
        return _Process(place, group, sum(fields.values()), fields.get("RssShmem", 0))
    # gVisor shows the sum alone, in which mapped files count too.
    return _Process(place, group, whole, 0) if whole else None


def _fields(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Sizes, in bytes, of a file with a name and a number of kilobytes in each line."""
    found = {}
    for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[name] = int(value.split()[0]) * _KIB
    return found


def _mounted(processes: list[_Process]) -> dict[int, int]:
    """Device -> bytes in use, of the sandbox's own mounts in memory.

    The first process may be hidden from an ordinary caller; any other has the same root.
    """
    host = os.stat("/")
    for process in processes:
        root = f"{process.task}/root"
        try:
            inside = os.stat(root)
            if (inside.st_dev, inside.st_ino) == (host.st_dev, host.st_ino):
                continue  # a helper outside
            found = {}
            for path in OWN_MOUNTS:
                used = os.statvfs(root + path)
                found[os.stat(root + path).st_dev] = (used.f_blocks - used.f_bfree) * used.f_frsize
        except OSError:
            continue
        return found
    return {}


def _proportional(process: _Process, devices: frozenset[int]) -> int:
    """Its part of what it shares with others; files on ``devices`` are counted elsewhere."""
    # /proc has an entry for each thread, also if only those of processes are listed.
    place = f"/proc/{os.path.basename(process.task)}"
    try:
        found = _fields(f"{place}/smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss"))
        if process.shared and devices:
            found["Pss_Shmem"] -= _on_devices(f"{place}/smaps", devices)
    except PermissionError:
        return process.bytes
    except (FileNotFoundError, ProcessLookupError, KeyError):
        return 0  # it ended while we looked
    return sum(found.values())


def _by_mapping(processes: list[_Process], devices: frozenset[int]) -> int:
    """Return the memory of all mappings, for gVisor: those that are shared count once.

    Pages that processes share since a fork count for each of them: nothing shows that they do.
    """
    private, shared = 0, dict[tuple[str, ...], int]()
    for process in processes:
        try:
            with open(f"{process.task}/smaps", encoding="utf-8", errors="replace") as file:
                lines = file.readlines()
        except PermissionError:
            private += process.bytes
            continue
        except OSError:
            continue  # it ended while we looked
        mapping: tuple[str, ...] | None = None
        for line in lines:
            head, _, rest = line.partition(" ")
            if head == "Anonymous:":
                private += int(rest.split()[0]) * _KIB
            elif head == "Rss:" and mapping is not None:
                size = int(rest.split()[0]) * _KIB
                shared[mapping] = max(shared.get(mapping, 0), size)
            elif not head.endswith(":"):
                mapping = _shared_memory(line, devices)
    return private + sum(shared.values())


def _shared_memory(line: str, devices: frozenset[int]) -> tuple[str, ...] | None:
    """Return what identifies shared memory without a file; None for every other mapping."""
    _, mode, offset, device, inode, *name = line.split(maxsplit=5)
    major, _, minor = device.partition(":")
    # Files on disk are page cache; those on the devices are counted with their mounts.
    if "s" not in mode or os.makedev(int(major, 16), int(minor, 16)) in devices:
        return None
    return (offset, device, inode) if "(deleted)" in "".join(name) else None


def _on_devices(path: str, devices: frozenset[int]) -> int:
    total, counts = 0, False
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            head, _, rest = line.partition(" ")
            if head.endswith(":"):
                if counts and head == "Pss:":
                    total += int(rest.split()[0]) * _KIB
            elif "-" in head:
                major, _, minor = line.split(maxsplit=5)[3].partition(":")
                counts = os.makedev(int(major, 16), int(minor, 16)) in devices
    return total


class MemoryWatch:
    """Calls ``on_exceeded`` once when a tree holds more than it may."""

    def __init__(self, first: int, limit: int, on_exceeded: Callable[[], None]) -> None:
        self._first = first
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._loop = asyncio.get_running_loop()
        self.exceeded = False
        self.peak = 0
        self._timer = self._loop.call_later(_EVERY_S, self._look)

    def _look(self) -> None:
        began = time.monotonic()
        used = tree_memory(self._first, self._limit)
        self.peak = max(self.peak, used)
        if used > self._limit:
            self.exceeded = True
            self._on_exceeded()
            return
        every_s = _OFTEN_S if used > self._limit // 2 else _EVERY_S
        wait_s = max(every_s, (time.monotonic() - began) * _SHARE)
        self._timer = self._loop.call_later(wait_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()
