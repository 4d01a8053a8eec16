"""Facts of the running kernel and process that plans depend on; each asked once."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Final

__all__ = ["can_give_away", "can_map_mounts", "is_root", "landlock_abi", "machine"]

_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_VERSION: Final = 1
_CAP_SYS_ADMIN: Final = 21
_CAPS_TO_GIVE_AWAY: Final = (0, 1, 3, 6, 7)
"""CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID: to run as another id and handle its files."""


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


def is_root() -> bool:
    return os.geteuid() == 0


def can_map_mounts() -> bool:
    """Whether mounts can be shown to another id as its own."""
    return bool(capabilities() >> _CAP_SYS_ADMIN & 1)


def can_give_away() -> bool:
    """Whether files can be given to another id, and still be handled."""
    held = capabilities()
    return all(held >> cap & 1 for cap in _CAPS_TO_GIVE_AWAY)
