"""The processes of a machine, read from its /proc; and of a sandbox, read from that of the host.

Sandboxed code chooses names and command lines: they are bounded and decoded, and nothing else is
derived from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._core.processes import MAX_COMMAND_BYTES, MAX_LISTED, ProcessInfo
from union.sandbox.constants import KILL_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

__all__ = ["label_of", "list_processes", "list_sandbox", "of_commands", "stop_process"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATE, _PARENT, _USER, _SYSTEM, _START, _RESIDENT = 0, 1, 11, 12, 19, 21
"""Fields of /proc/PID/stat after the name."""
_MAX_STAT: Final = 4096
_MAX_CHILDREN: Final = 65536
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK_S: Final = 0.01


def list_processes(proc: int) -> list[tuple[int, ProcessInfo]]:
    """Return the processes by pid, each with its label; ``proc`` is /proc of the machine."""
    pids = sorted(int(name) for name in os.listdir(proc) if name.isdecimal())
    found = ((_label(proc, pid), _describe(proc, pid)) for pid in pids if pid > 1)
    return [(label, info) for label, info in found if info is not None]


def list_sandbox(first: int) -> tuple[ProcessInfo, ...]:
    """Return the processes of a sandbox with a pid namespace, with the pids that they have inside.

    Args:
        first: the pid, on this host, of the process that all of them descend from. The product's
            own processes are left out: this one, and the first one inside.

    """
    proc = os.open("/proc", _DIRECTORY)
    try:
        own = _pids_of(proc, os.getpid())
        if not own:  # gVisor does not show pids inside, but has a /proc for each pid namespace
            return _list_inside(proc, first)
        inside: dict[int, int] = {}
        for pid in _descendants(proc, first):
            pids = _pids_of(proc, pid)
            if len(pids) > len(own):
                inside[pid] = pids[len(own)]
        found = []
        for pid, shown in inside.items():
            info = _describe(proc, pid) if shown > 1 else None
            if info is not None:
                parent = inside.get(info.parent, 0)
                found.append(dataclasses.replace(info, pid=shown, parent=parent))
        return tuple(sorted(found, key=lambda info: info.pid))
    finally:
        os.close(proc)


def _list_inside(proc: int, first: int) -> tuple[ProcessInfo, ...]:
    try:
        inside = os.open(os.path.join(str(first), "root", "proc"), _DIRECTORY, dir_fd=proc)
    except (FileNotFoundError, ProcessLookupError):
        return ()
    try:
        return tuple(info for _, info in list_processes(inside)[:MAX_LISTED])
    finally:
        os.close(inside)


def _descendants(proc: int, first: int) -> list[int]:
    """Return ``first`` and its descendants, at most ``MAX_LISTED``."""
    found = [first]
    for pid in found:  # grows meanwhile
        try:
            for task in _names(proc, f"{pid}/task"):
                children = _read(proc, f"{pid}/task/{task}/children", _MAX_CHILDREN)
                found.extend(map(int, children.split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if len(found) >= MAX_LISTED:
            break
    return found[:MAX_LISTED]


def _names(proc: int, name: str) -> list[str]:
    fd = os.open(name, _DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _pids_of(proc: int, pid: int) -> list[int]:
    """Return the pids of a process, from the namespace of ``proc`` inwards."""
    try:
        status = _read(proc, f"{pid}/status", _MAX_STAT)
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name is the first line, and a newline in it is escaped.
    lines = (line for line in status.split(b"\n") if line.startswith(b"NSpid:"))
    return [int(number) for line in lines for number in line.split()[1:]]


def of_commands(
    found: list[tuple[int, ProcessInfo]], *, running: AbstractSet[int], hidden: AbstractSet[int]
) -> tuple[ProcessInfo, ...]:
    """Return the processes of commands.

    Args:
        found: the processes, listed before ``hidden`` was collected: a sandbox announces its label
            before it has a process in the machine.
        running: labels of commands that have not ended.
        hidden: labels whose processes are the product's own.

    """
    return tuple(
        dataclasses.replace(info, left_behind=label not in running)
        for label, info in found
        if label not in hidden
    )[:MAX_LISTED]


def _describe(proc: int, pid: int) -> ProcessInfo | None:
    try:
        os.stat(f"{pid}/ns/net", dir_fd=proc)  # missing for a process that is ending
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        pass
    try:
        before, _, after = _read(proc, f"{pid}/stat", _MAX_STAT).rpartition(b")")
        line = _read(proc, f"{pid}/cmdline", MAX_COMMAND_BYTES)
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended meanwhile
    fields = after.split()
    if len(fields) <= _RESIDENT or fields[_STATE] in {b"Z", b"X"}:
        return None
    name = before.partition(b"(")[2].decode("utf-8", "replace")
    words = line.rstrip(b"\0").split(b"\0") if line else []
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START]) / _TICKS
    return ProcessInfo(
        pid=pid,
        parent=int(fields[_PARENT]),
        name=name,
        command=tuple(word.decode("utf-8", "replace") for word in words) or (name,),
        started_at=time.time() - max(ago_s, 0.0),
        cpu_s=(int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS,
        memory_bytes=int(fields[_RESIDENT]) * _PAGE,
        left_behind=False,
    )


def label_of(pid: int) -> int:
    """Return the label of a process of this host; 0 for one that cannot be inspected."""
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino
    except OSError:
        return 0


def _label(proc: int, pid: int) -> int:
    """Return the label of a process; 0 for one that cannot be inspected."""
    try:
        return os.stat(f"{pid}/ns/user", dir_fd=proc).st_ino
    except OSError:
        return 0


def _read(proc: int, name: str, size: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def stop_process(proc: int, pid: int, *, hidden: AbstractSet[int]) -> bool:
    """End a process; return False if there is none. Blocks for the grace period at most.

    The descriptor of its directory stays the same process, whatever happens to the number.
    """
    try:
        target = os.open(str(pid), _DIRECTORY, dir_fd=proc)
    except (FileNotFoundError, ProcessLookupError):
        return False
    try:
        if _label(proc, pid) in hidden or not _lives(target):
            return False
        for signum, wait_s in ((signal.SIGTERM, KILL_GRACE_S), (signal.SIGKILL, 1.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(target, signum)
            end = time.monotonic() + wait_s
            while _lives(target) and time.monotonic() < end:
                time.sleep(_LOOK_S)
            if not _lives(target):
                break
        return True
    finally:
        os.close(target)


def _lives(target: int) -> bool:
    try:
        after = _read(target, "stat", _MAX_STAT).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(after) and after[_STATE] not in {b"Z", b"X"}
