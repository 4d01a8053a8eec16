"""Facts of the running kernel and process that plans depend on; each asked once."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Final

__all__ = ["can_map_ids", "capabilities", "has_capability", "is_root", "landlock_abi", "machine"]

_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION: Final = 1
CAP_SETUID, CAP_SETGID, CAP_SYS_ADMIN, CAP_SETFCAP = 7, 6, 21, 31


@functools.cache
def landlock_abi() -> int:
    """The newest Landlock the kernel offers; 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), _LANDLOCK_VERSION
    )
    return max(int(abi), 0)


@functools.cache
def machine() -> str:
    return platform.machine()


def capabilities() -> int:
    """The effective capabilities of this process, as a bit mask."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def has_capability(number: int) -> bool:
    return bool(capabilities() >> number & 1)


def is_root() -> bool:
    return os.geteuid() == 0


def can_map_ids() -> bool:
    """Whether mounts can be given to another id, so that root need not be root inside."""
    return has_capability(CAP_SYS_ADMIN)
