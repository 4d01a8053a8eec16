"""Resets what the launcher, and with it every sandbox, would inherit from the caller.

The limits are set once, on the launcher, before it starts anything. The kernel copies them into
each user namespace made below it and holds everything in that namespace to them, counted together
with what the owner of the namespace uses otherwise. Half of the caller's own limit is therefore
always left to the caller.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import resource
from pathlib import Path
from typing import Final

from union.sandbox._linux import cgroup, kernel

_LOGGER: Final = logging.getLogger("union.sandbox")

__all__ = ["can_stop_core_dumps", "process_budget", "reset", "signal_budget"]

_CAP_SYS_RESOURCE: Final = 24
_IOPRIO: Final = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of ioprio_set and ioprio_get."""
_IOPRIO_PROCESS, _IOPRIO_SHIFT, _IOPRIO_RT, _IOPRIO_BE = 1, 13, 1, 2
_IOPRIO_DEFAULT_LEVEL: Final = 4
_SCHED_DEADLINE: Final = 6
_FIRST_TO_GO: Final = 500
"""As if a sandbox used half of the memory that there is, in addition to its own."""
_HALVED: Final = ("RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_MEMLOCK")
_SIGNALS_IF_UNLIMITED: Final = 32768
_PROCESSES_IF_UNKNOWN: Final = 32768
_SESSIONS_AT_ONCE: Final = 4
"""A session gets this part of what all sessions together may queue."""


def reset(pid: int) -> None:
    """Set the limits and priorities of the launcher ``pid``, which its sandboxes inherit."""
    for kind, value in _limits().items():
        resource.prlimit(pid, kind, (value, value))
    if can_stop_core_dumps():
        # The kernel starts no program of core_pattern for a process with this very value.
        resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))
    _reset_priorities(pid)
    _reset_oom_score(pid)


def _limits() -> dict[int, int]:
    found = {kind: _half(kind) for kind in (getattr(resource, name) for name in _HALVED)}
    found |= {resource.RLIMIT_RTPRIO: 0, resource.RLIMIT_NICE: 0}
    found[resource.RLIMIT_NPROC] = process_budget()
    return {kind: value for kind, value in found.items() if _exists(kind)}


@functools.cache
def _exists(kind: int) -> bool:
    """Return whether the kernel has this limit: gVisor refuses to set one that it does not have."""
    if not kernel.is_gvisor():
        return True
    try:
        resource.setrlimit(kind, resource.getrlimit(kind))
    except (ValueError, PermissionError):
        return False
    return True


def _half(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    if soft == resource.RLIM_INFINITY:
        return _SIGNALS_IF_UNLIMITED if kind == resource.RLIMIT_SIGPENDING else soft
    return soft // 2


def signal_budget() -> int:
    """How many signals all runs of one session may have queued at a time; 0: no such limit."""
    if not _exists(resource.RLIMIT_SIGPENDING):
        return 0
    return max(_half(resource.RLIMIT_SIGPENDING) // _SESSIONS_AT_ONCE, 1)


@functools.cache
def process_budget() -> int:
    """How many processes and threads sandboxes may reach: three quarters of what there is room for.

    For an ordinary user the kernel counts all processes of the user; for root those of a session.
    """
    settings = [Path("/proc/sys/kernel", name) for name in ("pid_max", "threads-max")]
    room = [int(path.read_text(encoding="ascii")) for path in settings if path.exists()]
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    room += [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    room += [limit for limit in (cgroup.process_limit(),) if limit is not None]
    return max(min(room, default=_PROCESSES_IF_UNKNOWN) * 3 // 4, 1)


def can_stop_core_dumps() -> bool:
    """Whether the limit on core dumps can be 1: a lower hard limit is raised by root alone."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    return hard != 0 or bool(kernel.capabilities() >> _CAP_SYS_RESOURCE & 1)


def _reset_priorities(pid: int) -> None:
    """Take away what puts a process before others; what puts it behind them stays."""
    policy = os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK
    if policy in {os.SCHED_FIFO, os.SCHED_RR, _SCHED_DEADLINE}:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, pid) < 0:
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    set_nr, get_nr = _IOPRIO[kernel.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    found = libc.syscall(ctypes.c_long(get_nr), _IOPRIO_PROCESS, pid)
    if found < 0:
        _raise_unless_missing("ioprio_get")
        return
    level, kind = found & ((1 << _IOPRIO_SHIFT) - 1), found >> _IOPRIO_SHIFT
    before_others = kind == _IOPRIO_BE and level < _IOPRIO_DEFAULT_LEVEL
    if (kind == _IOPRIO_RT or before_others) and libc.syscall(
        ctypes.c_long(set_nr), _IOPRIO_PROCESS, pid, 0
    ) < 0:
        _raise_unless_missing("ioprio_set")


def _raise_unless_missing(call: str) -> None:
    """A kernel without block devices has no I/O priorities."""
    error = ctypes.get_errno()
    if error != errno.ENOSYS:
        raise OSError(error, f"{call}: {os.strerror(error)}")


def _reset_oom_score(pid: int) -> None:
    """Make sandboxes the first that the kernel kills when memory runs out, before the caller.

    A privileged writer also sets the lowest value that the process may choose for itself.
    """
    path = Path(f"/proc/{pid}/oom_score_adj")
    value = int(path.read_text(encoding="ascii"))
    try:
        path.write_text(str(max(value, _FIRST_TO_GO)), encoding="ascii")
    except OSError as exc:
        # Where /proc is read-only. A protection of the caller must not be inherited, though.
        if value < 0:
            raise
        _LOGGER.debug("the OOM score of sandboxes stays at %d: %s", value, exc)
