"""What ``inside.py`` is made of: the bait, raw system calls, and the rows of its result.

Both files are copied into the work dir of the session under attack.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BAIT: dict[str, Any] = json.loads(sys.argv[1])
SECRET, HOME, PID = BAIT["secret"], os.path.dirname(BAIT["secret"]), BAIT["pid"]
IS_BARE = BAIT["bare"]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
FASTOPEN = 0x20000000
NR = {
    "x86_64": {"ioprio_set": 251, "shmget": 29, "mq_open": 240, "ptrace": 101, "readv": 310,
               "inotify_init": 294, "inotify_add_watch": 254, "unshare": 272, "mount": 165,
               "fchmodat": 268, "fchmodat2": 452, "utimensat": 280, "connect": 42,
               "name_to_handle_at": 303, "pidfd_getfd": 438, "open_tree": 428},
    "aarch64": {"ioprio_set": 30, "shmget": 194, "mq_open": 180, "ptrace": 117, "readv": 270,
                "inotify_init": 26, "inotify_add_watch": 27, "unshare": 97, "mount": 40,
                "fchmodat": 53, "fchmodat2": 452, "utimensat": 88, "connect": 203,
                "name_to_handle_at": 264, "pidfd_getfd": 438, "open_tree": 428},
}[os.uname().machine]  # fmt: skip
ROWS: list[tuple[str, str, str]] = []


def call(number: int, *arguments: Any) -> int:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def must(effect: Any) -> Any:
    if not effect:
        raise OSError(errno.EACCES, "no effect")
    return effect


def attack(name: str, action: Callable[[], Any], *, harmless: bool = True) -> None:
    """Try an attack. One that is not harmless is left out where nothing stands in its way."""
    if IS_BARE and not harmless:
        return
    try:
        ROWS.append((name, "OPEN", repr(action())[:120]))
    except (OSError, subprocess.SubprocessError) as exc:
        ROWS.append((name, "held", f"{type(exc).__name__}: {exc}"[:120]))


def control(name: str, action: Callable[[], Any]) -> None:
    """Check that something ordinary works."""
    try:
        ROWS.append((name, "works", repr(action())[:120]))
    except Exception as exc:  # noqa: BLE001 - any failure is the result
        ROWS.append((name, "BROKEN", f"{type(exc).__name__}: {exc}"[:120]))


def linked(name: str, target: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    os.symlink(target, name)
    return name
