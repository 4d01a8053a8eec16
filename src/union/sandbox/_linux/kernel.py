"""Properties of the running kernel and process that plans depend on."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from pathlib import Path
from typing import Final

from union.sandbox._plan.adaptation import LINUX, KernelFeatures

__all__ = [
    "can_give_away",
    "can_map_mounts",
    "can_own_namespaces",
    "can_read_memory",
    "capabilities",
    "features",
    "has_seccomp",
    "is_filtered",
    "is_gvisor",
    "is_root",
    "landlock_abi",
    "machine",
    "start_time",
]

_MOUNT_SETATTR: Final = 442
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION: Final = 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SYSLOG_READ_ALL: Final = 3
_CAPABILITY_VERSION: Final = 0x20080522
_CAP_SYS_ADMIN: Final = 21
_CAPS_TO_OWN: Final = (1, 19, 21)
"""DAC_OVERRIDE, SYS_PTRACE, SYS_ADMIN."""
_CAPS_TO_GIVE_AWAY: Final = (0, 1, 3, 6, 7)
"""CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID: to run as another id and handle its files."""


@functools.cache
def landlock_abi() -> int:
    """Return the Landlock ABI version of the kernel; 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), _LANDLOCK_VERSION
    )
    return max(int(abi), 0)


@functools.cache
def machine() -> str:
    """Return the architecture, such as ``x86_64``."""
    return platform.machine()


def _status(field: str) -> str:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def capabilities() -> int:
    """Return the effective capabilities of this thread, as a bit mask.

    They are needed several times for each session. The kernel formats a whole page for
    /proc/self/status, which is read only where the system call is refused.
    """
    header, data = _CapHeader(_CAPABILITY_VERSION, 0), (_CapData * 2)()
    if _libc().capget(ctypes.byref(header), ctypes.byref(data)) != 0:
        return int(_status("CapEff") or "0", 16)
    return int(data[1].effective << 32 | data[0].effective)


def is_filtered() -> bool:
    """Return whether a system-call filter applies to this process, as in most containers."""
    return _status("Seccomp") == "2"


def has_seccomp() -> bool:
    """Return whether the kernel supports system-call filters, without loading one."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A filter at a null address: EFAULT if filters are supported, EINVAL if not.
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def can_read_memory() -> bool:
    """Return whether this process may read memory of others: a filter can refuse the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Of this process, and no byte of it.
    return int(libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0)) == 0


@functools.cache
def is_gvisor() -> bool:
    """Return whether the kernel is gVisor's, which its log shows."""
    libc = ctypes.CDLL(None, use_errno=True)
    log = ctypes.create_string_buffer(4096)
    size = libc.klogctl(_SYSLOG_READ_ALL, log, len(log))
    return size > 0 and b"Starting gVisor" in log.raw


@functools.cache
def features() -> KernelFeatures:
    """Return the features that plans adapt to, as far as they can be found without a sandbox.

    Only gVisor lacks any. A trial sandbox finds the rest: securebits and nf_tables.
    """
    if not is_gvisor():
        return LINUX
    return KernelFeatures(
        cgroup_namespaces=os.path.exists("/proc/self/ns/cgroup"),
        mount_trees=_has_mount_setattr(),
        terminal_options=False,
        init_is_immune=False,
        read_only_metadata=False,
        own_proc_net=False,
        own_process_count=False,
    )


def _has_mount_setattr() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # An attribute structure of size 0 is invalid wherever the call exists.
    libc.syscall(ctypes.c_long(_MOUNT_SETATTR), -1, b"", 0, None, ctypes.c_size_t(0))
    return ctypes.get_errno() != errno.ENOSYS


def start_time(pid: int) -> int:
    """Return the start time of a process in ticks since boot; with its pid it is unique."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def is_root() -> bool:
    """Return whether the effective user is root."""
    return os.geteuid() == 0


def can_map_mounts() -> bool:
    """Return whether this process can create id-mapped mounts."""
    return bool(capabilities() >> _CAP_SYS_ADMIN & 1)


def can_own_namespaces() -> bool:
    """Return whether the launcher can make user namespaces owned by another id (native/proc.c)."""
    held = capabilities()
    return all(held >> cap & 1 for cap in _CAPS_TO_OWN)


def can_give_away() -> bool:
    """Return whether files can be given to another id and still be managed."""
    held = capabilities()
    return all(held >> cap & 1 for cap in _CAPS_TO_GIVE_AWAY)
