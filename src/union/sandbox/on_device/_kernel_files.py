"""Files of /proc and kernel limits that belong to a user id rather than to a namespace."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import kernel

if TYPE_CHECKING:
    from union.sandbox._backends.base import Identity

__all__ = ["counters", "guarded_proc", "has_own_counters", "hidden_proc"]

_PROC: Final = "/proc"
_KEYS: Final = ("keys", "key-users")
"""They list the caller's keys to every process with the caller's id."""
_PRIVATE: Final = ("kallsyms", "kcore", "kmsg", "iomem", "ioports", "interrupts", "mtrr")
"""World-readable by their mode, with parts that the kernel shows to root only."""
_COUNTERS: Final = {
    "max_inotify_instances": "fs/inotify/max_user_instances",
    "max_inotify_watches": "fs/inotify/max_user_watches",
}
"""Limit of a user namespace -> the setting for one user of this machine."""
_DIVISOR: Final = 4
"""A session gets this fraction of the limit of one user."""


def _entries() -> list[tuple[str, os.stat_result]]:
    """Return the entries of /proc that are neither processes nor links."""
    with os.scandir(_PROC) as found:
        names = [e for e in found if not e.name.isdecimal() and not e.is_symlink()]
    return [(entry.path, entry.stat(follow_symlinks=False)) for entry in names]


def hidden_proc(identity: Identity) -> tuple[str, ...]:
    """Return files that would show the sandbox data of the caller, or of root alone."""
    if identity.kind == "host":
        return ()
    names = {f"{_PROC}/{name}" for name in _KEYS}
    if identity.kind == "unprivileged":
        return ()  # an id of its own has no keys
    if identity.host_uid == 0:
        names |= {f"{_PROC}/{name}" for name in _PRIVATE}
        names |= {
            path
            for path, found in _entries()
            if stat.S_ISREG(found.st_mode) and not found.st_mode & stat.S_IROTH
        }
    return tuple(sorted(name for name in names if os.path.exists(name)))


def guarded_proc(identity: Identity) -> tuple[str, ...]:
    """Return entries of /proc that the id of root may write without any capability."""
    if identity.host_uid != 0 or identity.kind == "host":
        return ()
    hidden = hidden_proc(identity)
    found = []
    for path, entry in _entries():
        is_writable_file = stat.S_ISREG(entry.st_mode) and entry.st_mode & 0o222
        if (stat.S_ISDIR(entry.st_mode) or is_writable_file) and path not in hidden:
            found.append(path)
    return tuple(sorted(found))


def has_own_counters(identity: Identity) -> bool:
    """Return whether a session's user namespaces belong to an id of its own.

    Without some capabilities they belong to the caller, whatever the id inside is.
    """
    return identity.kind == "unprivileged" and kernel.can_own_namespaces()


def counters(identity: Identity) -> tuple[tuple[str, int], ...]:
    """Return limits for the user namespace of a session that shares the caller's id.

    A session with an id of its own has counters of its own.
    """
    if identity.kind == "host" or has_own_counters(identity):
        return ()
    found = []
    for name, setting in _COUNTERS.items():
        if os.path.exists(f"{_PROC}/sys/user/{name}"):
            per_user = int(Path(_PROC, "sys", setting).read_text(encoding="ascii"))
            found.append((name, max(per_user // _DIVISOR, 1)))
    return tuple(found)
