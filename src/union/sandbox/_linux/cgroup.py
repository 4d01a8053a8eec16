"""One control group per sandbox, where the host lets us make one: limits, peak memory, OOM.

Both versions are served: v2 through one directory, v1 through one per controller. A place is
usable when a group can be made there and has the controllers; nothing of the host's own groups is
changed, and no process of the host is moved.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.spec import Limits

__all__ = ["Group", "Hierarchy", "hierarchy", "memory_limit", "oom_kills", "process_limit"]

_NUMBERS = itertools.count(1)
_PREFIX: Final = "sandbox-"
_SWEEP_AFTER_S: Final = 5.0
_CPU_PERIOD_US: Final = 100_000
_NO_LIMIT: Final = 2**60
_TCP_BYTES: Final = 64 * 2**20
"""Enough for a thousand connections that are all in use."""
_V1_CONTROLLERS: Final = (
    ("memory", ("memory.limit_in_bytes", "memory.oom_control")),
    ("cpu", ("cpu.cfs_quota_us",)),
    ("pids", ("pids.max",)),
)
"""Files that a controller must have. A memory controller that reports no kills enforces nothing:
gVisor's accepts a limit and ignores it."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups can be made: the version, and the directory for each controller."""

    version: int
    places: tuple[tuple[str, str], ...]

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.places)


@functools.cache
def hierarchy() -> Hierarchy | None:
    """The usable hierarchy of this process; None when no group can be made."""
    memberships = _memberships()
    mounts = tuple(_mounts())
    found = _find_v2(mounts, memberships) or _find_v1(mounts, memberships)
    if found is not None:
        for place in {place for _, place in found.places}:
            sweep(place)
    return found


def sweep(place: str) -> None:
    """Remove the groups that a host which was killed has left; no other process removes them.

    Only those whose maker is gone, and not new ones: a maker in another pid namespace is not
    visible, but puts a process into its group at once. A group with a process in it stays.
    """
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            maker = entry.name.removeprefix(_PREFIX).partition("-")[0]
            if not maker.isdecimal() or os.path.exists(f"/proc/{maker}"):
                continue
            with contextlib.suppress(OSError):
                if now - entry.stat(follow_symlinks=False).st_mtime > _SWEEP_AFTER_S:
                    os.rmdir(entry.path)


def process_limit() -> int | None:
    """The lowest limit on processes of the groups that this process is in; None: there is none."""
    return _lowest("pids", "pids.max", "pids.max")


def memory_limit() -> int | None:
    """The lowest memory limit of the groups that this process is in; None: there is none."""
    found = _lowest("memory", "memory.limit_in_bytes", "memory.max")
    # Version 1 has no other way to say that there is no limit.
    return None if found is None or found > _NO_LIMIT else found


def oom_kills() -> int:
    """How many processes of this process's own group the kernel has killed for memory."""
    for place, _, version in _own_places("memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        for line in _lines(str(place / name)):
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def _own_places(controller: str) -> Iterator[tuple[Path, str, int]]:
    """(directory of this process's group, mount point, version) for a controller."""
    memberships = _memberships()
    for kind, root, point, options in _mounts():
        is_v2 = kind == "cgroup2"
        own = memberships.get("" if is_v2 else controller)
        if own is not None and (is_v2 or controller in options.split(",")):
            yield _below(root, point, own), point, 2 if is_v2 else 1


def _lowest(controller: str, v1_name: str, v2_name: str) -> int | None:
    limits = []
    for found, point, version in _own_places(controller):
        place = found
        while place.is_relative_to(point):
            lines = _lines(str(place / (v2_name if version == 2 else v1_name)))
            limits += [int(line) for line in lines if line.isdecimal()]
            place = place.parent
    return min(limits, default=None)


def _memberships() -> dict[str, str]:
    """Controller -> the path of this process's group; the key of version 2 is empty."""
    found: dict[str, str] = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[name] = path
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise  # not an answer, and what is found here is kept
        return []


def _mounts() -> list[tuple[str, str, str, str]]:
    """(type, root, mount point, super options) of every cgroup mount."""
    found = []
    for line in _lines("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if tail and tail[0] in {"cgroup", "cgroup2"}:
            found.append((tail[0], fields[3], fields[4], tail[2]))
    return found


def _below(root: str, point: str, path: str) -> Path:
    relative = path[len(root) :] if root != "/" and path.startswith(root) else path
    return Path(point) / relative.lstrip("/")


def _find_v2(
    mounts: tuple[tuple[str, str, str, str], ...], own: dict[str, str]
) -> Hierarchy | None:
    for kind, root, point, _ in mounts:
        if kind != "cgroup2":
            continue
        place = _below(root, point, own.get("", "/"))
        while place.is_relative_to(point):
            enabled = " ".join(_lines(str(place / "cgroup.subtree_control"))).split()
            if "memory" in enabled and _usable(place, ("memory.max", "memory.events")):
                names = [c for c in ("memory", "pids", "cpu") if c in enabled]
                return Hierarchy(2, tuple((name, str(place)) for name in names))
            place = place.parent
    return None


def _find_v1(
    mounts: tuple[tuple[str, str, str, str], ...], own: dict[str, str]
) -> Hierarchy | None:
    places = []
    for kind, root, point, options in mounts:
        if kind != "cgroup":
            continue
        for name, needed in _V1_CONTROLLERS:
            if name in options.split(",") and name in own:
                place = _below(root, point, own[name])
                if _usable(place, needed):
                    places.append((name, str(place)))
    return Hierarchy(1, tuple(places)) if any(n == "memory" for n, _ in places) else None


def _usable(place: Path, needed: tuple[str, ...]) -> bool:
    trial = place / f"{_PREFIX}{os.getpid()}-trial"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        limit, *others = needed
        return (
            os.access(trial / limit, os.W_OK)
            and os.access(trial / "cgroup.procs", os.W_OK)
            and all((trial / name).exists() for name in others)
        )
    finally:
        trial.rmdir()


class Group:
    """The group of one sandbox. ``procs`` are descriptors the launcher writes the first pid to.

    ``own`` is the number of our own processes in it, which count too.
    """

    def __init__(self, where: Hierarchy, limits: Limits, *, own: int) -> None:
        self._version = where.version
        name = f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        self._dirs: dict[str, Path] = {}
        self.procs: list[int] = []
        self._end: tuple[bool, int | None] | None = None
        try:
            for controller, place in where.places:
                directory = Path(place) / name
                if directory not in self._dirs.values():
                    directory.mkdir()
                self._dirs[controller] = directory
            self._limit(limits, own)
            for directory in dict.fromkeys(self._dirs.values()):
                self.procs.append(os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            self.release_procs()
            self.remove()
            raise

    def _limit(self, limits: Limits, own: int) -> None:
        v2 = self._version == 2
        memory, cpu = self._dirs["memory"], self._dirs.get("cpu")
        if limits.memory_bytes is not None:
            size = str(limits.memory_bytes)
            (memory / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(size)
            for other, value in (
                ("memory.swap.max", "0"),
                ("memory.memsw.limit_in_bytes", size),
                # Version 1 counts buffers of sockets by themselves, and only if there is a limit.
                ("memory.kmem.tcp.limit_in_bytes", str(min(limits.memory_bytes // 4, _TCP_BYTES))),
            ):
                if (memory / other).exists():
                    (memory / other).write_text(value)
        if "pids" in self._dirs:
            maximum = str(limits.processes + own)
            (self._dirs["pids"] / "pids.max").write_text(maximum)
        if limits.cpus is not None and cpu is not None:
            quota = max(int(limits.cpus * _CPU_PERIOD_US), 1000)
            if v2:
                (cpu / "cpu.max").write_text(f"{quota} {_CPU_PERIOD_US}")
            else:
                (cpu / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
                (cpu / "cpu.cfs_quota_us").write_text(str(quota))

    @property
    def paths(self) -> tuple[str, ...]:
        """Its directories; none when it is removed."""
        return tuple(map(str, dict.fromkeys(self._dirs.values())))

    def release_procs(self) -> None:
        while self.procs:
            os.close(self.procs.pop())

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed for memory in this group; also to be asked after its end."""
        if self._end is None:
            return self._saw_oom_kill()
        return self._end[0]

    def peak_memory(self) -> int | None:
        """Return the peak memory of all processes together; also valid after their end."""
        if self._end is None:
            return self._peak()
        return self._end[1]

    def _saw_oom_kill(self) -> bool:
        return self.kills() > 0

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for memory."""
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        for line in self._lines_of(name):
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def _peak(self) -> int | None:
        v2 = self._version == 2
        name = "memory.peak" if v2 else "memory.max_usage_in_bytes"
        lines = self._lines_of(name)
        return int(lines[0]) if lines else None

    def _lines_of(self, name: str) -> list[str]:
        try:
            return _lines(str(self._dirs["memory"] / name))
        except OSError:  # no descriptor is left to ask with
            return []

    def remove(self) -> None:
        """Removes the group; its processes must be gone."""
        if "memory" in self._dirs:
            self._end = (self._saw_oom_kill(), self._peak())
        for directory in dict.fromkeys(self._dirs.values()):
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()
        self._dirs.clear()
