"""Count the epoll watches of process trees.

The kernel counts epoll watches for each user id, and has no limit below that. A process with D
descriptors can hold about D**3 / 4 of them: a watch is a pair of a file and a descriptor's number,
and stays when the number is closed while the file is open under another one.

The size of a descriptor table, which every process shows, bounds its watches. Only if the bound is
too high are the watches counted, from fdinfo of each epoll descriptor. A table that cannot be read
counts with its bound. Descriptors in messages that no process has received are not listed; they
are counted where a message waits.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import random
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._linux import kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Holding",
    "Table",
    "bound",
    "count",
    "descriptor_tables",
    "hidden",
    "is_exhausted",
    "max_watches",
]

_KCMP: Final = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE, _KCMP_FILES = 0, 2
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SYSTEM, _CHILDREN_SYSTEM = 12, 14
"""Fields of /proc/PID/stat after the name."""
_MAX_PROCESSES: Final = 8192
_COUNT_S: Final = 0.1
_MIN_SAMPLE: Final = 16
_CHUNK: Final = 1 << 16
_PROBES: Final = 16
"""Watches that must be left for the caller."""


class Table(NamedTuple):
    """The descriptor table of a process or of a thread."""

    pid: int
    thread: int
    size: int
    """Its highest number so far, rounded up."""


class Holding(NamedTuple):
    """What makes a tree suspect when no watch is left."""

    in_flight: int
    """Descriptors in messages that no process has received."""
    system_s: float
    """Processor time that its processes have spent in the kernel."""


@functools.cache
def max_watches() -> int:
    """Return the epoll watches that one user may have.

    0 if the kernel has no such limit, or does not list the children of a process.
    """
    path = Path("/proc/sys/fs/epoll/max_user_watches")
    if not path.exists() or not os.path.exists("/proc/thread-self/children"):
        return 0
    return int(path.read_text(encoding="ascii"))


def descriptor_tables(first: int) -> list[Table]:
    """Return the tables of all descendants of a sandbox's first process.

    A thread may have its own. Those of the product's own processes are left out: the first one,
    and the first one of a pid namespace.
    """
    waiting, seen, found = [first], {first}, list[Table]()
    while waiting and len(seen) <= _MAX_PROCESSES:
        pid = waiting.pop()
        for thread in _names(f"/proc/{pid}/task"):
            try:
                status = Path(f"/proc/{pid}/task/{thread}/status").read_bytes()
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            except OSError:
                continue  # it has ended meanwhile
            size, is_own = _table(status)
            if pid != first and not is_own:
                found.append(Table(pid, int(thread), size))
            fresh = set(map(int, children.split())) - seen
            seen |= fresh
            waiting.extend(fresh)
    return found


def _table(status: bytes) -> tuple[int, bool]:
    """Return the size of the table, and whether the process is the first of its namespace."""
    size, is_first = 0, False
    for line in status.splitlines():
        if line.startswith(b"FDSize:"):
            size = int(line.split()[1])
        elif line.startswith(b"NSpid:"):
            is_first = line.split()[1:][-1:] == [b"1"]
    return size, is_first


def bound(tables: Iterable[Table]) -> int:
    """Return the most watches that processes with these tables can hold."""
    return sum(_most(table.size) for table in tables)


def _most(size: int) -> int:
    return size**3 // 4


def count(tables: Iterable[Table], enough: int, *, seconds: float = _COUNT_S) -> int:
    """Return the watches in these tables.

    Counting ends above ``enough``. If it takes longer than ``seconds``, which only many watches
    cause, the result is estimated from a random part of the epoll instances.
    """
    until = time.monotonic() + seconds
    total, epolls = 0, list[tuple[int, int]]()
    own = _Distinct(_KCMP_FILES)
    for table in tables:
        if not own.add(table.thread, 0):
            continue  # a thread that shares the table of another one
        try:
            found = _descriptors(table.thread, "anon_inode:[eventpoll]")
            epolls.extend((table.thread, fd) for fd in found)
        except PermissionError:
            if not _is_ending(table.thread):
                total += _most(table.size)
    random.shuffle(epolls)  # no program can foresee which of them are counted
    distinct, counted = _Distinct(_KCMP_FILE), 0
    for number, (thread, fd) in enumerate(epolls, 1):
        # Processes share the descriptors that they had before they were forked.
        if distinct.add(thread, fd):
            counted += _watches(f"/proc/{thread}/fdinfo/{fd}", enough - total)
        if total + counted > enough:
            break
        if number >= _MIN_SAMPLE and time.monotonic() > until:
            counted = counted * len(epolls) // number
            break
    return total + counted


def _descriptors(thread: int, target: str) -> Iterable[int]:
    for name in _names(f"/proc/{thread}/fd", unreadable_raises=True):
        try:
            found = os.readlink(f"/proc/{thread}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        if found.startswith(target):
            yield int(name)


def _watches(path: str, enough: int) -> int:
    found, rest = 0, b""
    try:
        with open(path, "rb", buffering=0) as file:
            while found <= enough and (data := file.read(_CHUNK)):
                found += (rest + data).count(b"tfd:")
                rest = data[-3:]
    except (FileNotFoundError, ProcessLookupError):
        return 0  # closed meanwhile
    return found


def hidden(tables: list[Table], until: float) -> Holding:
    """Return what a tree may hold elsewhere; looking ends at the time ``until``."""
    in_flight, ticks = 0, 0
    for pid in {table.pid for table in tables}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        ticks += int(fields[_SYSTEM]) + int(fields[_CHILDREN_SYSTEM])
    own = _Distinct(_KCMP_FILES)
    for table in tables:
        if time.monotonic() > until:
            break
        try:
            if not own.add(table.thread, 0):
                continue
            for fd in _descriptors(table.thread, "socket:"):
                in_flight += _field(f"/proc/{table.thread}/fdinfo/{fd}", "scm_fds:")
        except PermissionError:
            in_flight += not _is_ending(table.thread)
        except OSError:
            continue
    return Holding(in_flight, ticks / _TICKS)


def _is_ending(thread: int) -> bool:
    """Return whether a process has no memory any more: it ends, and its files are root's."""
    try:
        return Path(f"/proc/{thread}/statm").read_bytes().startswith(b"0 ")
    except OSError:
        return True


def is_exhausted() -> bool:
    """Return whether this user has no epoll watches left."""
    made: list[select.epoll] = []
    try:
        made.append(select.epoll())
        for _ in range(_PROBES):
            made.append(select.epoll())
            made[0].register(made[-1], 0)
    except OSError as exc:
        return exc.errno == errno.ENOSPC
    finally:
        for one in made:
            one.close()
    return False


def _field(path: str, name: str) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return int(line[len(name) :])
    return 0


def _names(path: str, *, unreadable_raises: bool = False) -> list[str]:
    try:
        return os.listdir(path)
    except PermissionError:
        if unreadable_raises:
            raise
    except OSError:
        pass  # it has ended meanwhile
    return []


class _Distinct:
    """Kernel objects of processes, each once; where they cannot be compared, all are distinct."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._sorted: list[tuple[int, int]] = []
        self._others = 0

    def __len__(self) -> int:
        return len(self._sorted) + self._others

    def add(self, thread: int, fd: int) -> bool:
        """Return whether the object is new. A descriptor's number is ignored for tables."""
        low, high = 0, len(self._sorted)
        while low < high:
            middle = (low + high) // 2
            order = _compare(self._kind, (thread, fd), self._sorted[middle])
            if order is None:
                self._others += 1
                return True
            if order == 0:
                return False
            low, high = (low, middle) if order == 1 else (middle + 1, high)
        self._sorted.insert(low, (thread, fd))
        return True


def _compare(kind: int, one: tuple[int, int], other: tuple[int, int]) -> int | None:
    """Return 0 for the same object, 1 and 2 for its place in a fixed order, None if unknown."""
    call = _kcmp()
    found = call(one[0], other[0], kind, one[1], other[1]) if call is not None else -1
    return found if found in {0, 1, 2} else None


@functools.cache
def _kcmp():  # type: ignore[no-untyped-def] # noqa: ANN202
    number = _KCMP.get(kernel.machine())
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    long = ctypes.c_ulong
    return lambda a, b, kind, x, y: libc.syscall(
        ctypes.c_long(number), long(a), long(b), long(kind), long(x), long(y)
    )
