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
import os
import resource
from pathlib import Path
from typing import Final

from union.sandbox._linux import cgroup, kernel

__all__ = ["can_stop_core_dumps", "process_budget", "reset", "signal_budget"]

_CAP_SYS_RESOURCE: Final = 24
_IOPRIO: Final = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of ioprio_set and ioprio_get."""
_IOPRIO_PROCESS, _IOPRIO_SHIFT, _IOPRIO_RT, _IOPRIO_BE = 1, 13, 1, 2
_IOPRIO_DEFAULT_LEVEL: Final = 4
_SCHED_DEADLINE: Final = 6
_HALVED: Final = (
    resource.RLIMIT_SIGPENDING,
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_MEMLOCK,
)
_SIGNALS_IF_UNLIMITED: Final = 32768
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
    found = {kind: _half(kind) for kind in _HALVED}
    found |= {resource.RLIMIT_RTPRIO: 0, resource.RLIMIT_NICE: 0}
    found[resource.RLIMIT_NPROC] = process_budget()
    return found


def _half(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    if soft == resource.RLIM_INFINITY:
        return _SIGNALS_IF_UNLIMITED if kind == resource.RLIMIT_SIGPENDING else soft
    return soft // 2


def signal_budget() -> int:
    """How many signals all runs of one session may have queued at a time."""
    return max(_half(resource.RLIMIT_SIGPENDING) // _SESSIONS_AT_ONCE, 1)


@functools.cache
def process_budget() -> int:
    """How many processes and threads sandboxes may reach: three quarters of what there is room for.

    For an ordinary user the kernel counts all processes of the user; for root those of a session.
    """
    room = [int(Path(f"/proc/sys/kernel/{n}").read_text()) for n in ("pid_max", "threads-max")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    room += [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    room += [limit for limit in (cgroup.process_limit(),) if limit is not None]
    return max(min(room) * 3 // 4, 1)


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
    """Never better protected than a process of default value, and never better than the caller.

    A privileged writer also sets the lowest value that the process may choose for itself.
    """
    path = Path(f"/proc/{pid}/oom_score_adj")
    value = int(path.read_text(encoding="ascii"))
    if value < 0 or kernel.capabilities() >> _CAP_SYS_RESOURCE & 1:
        path.write_text(str(max(value, 0)), encoding="ascii")
