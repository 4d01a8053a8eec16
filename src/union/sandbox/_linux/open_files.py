"""Find the files of a work dir that processes have open for writing."""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._linux.tree import WorkTree

__all__ = ["open_for_writing"]

_FLAGS: Final = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_MAX_FILES: Final = 20
_DELETED: Final = " (deleted)"


def open_for_writing(tree: WorkTree, path: str) -> tuple[str, ...]:
    """Return paths, relative to the work dir, that any process has open for writing.

    The list helps a person: it is complete only for processes that this one may inspect, and has
    at most 20 entries.

    Args:
        tree: the work dir.
        path: its path inside the sandbox, which is also what the kernel reports.

    """
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # another user's, or ended meanwhile
        for name in names:
            below = _written(pid, name, path)
            if below is not None and _is_same(tree, below, f"/proc/{pid}/fd/{name}"):
                found.add(below)
                if len(found) == _MAX_FILES:
                    return tuple(sorted(found))
    return tuple(sorted(found))


def _written(pid: str, name: str, path: str) -> str | None:
    """Return the path of one descriptor below ``path`` if it is open for writing."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if not target.startswith(path + "/"):
            return None
        with open(f"/proc/{pid}/fdinfo/{name}", encoding="ascii") as info:
            flags = _FLAGS.search(info.read())
    except OSError:
        return None
    if flags is None or int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY:
        return None
    return target[len(path) + 1 :]


def _is_same(tree: WorkTree, below: str, descriptor: str) -> bool:
    """Return whether a descriptor refers to this work dir: others may have the same path."""
    try:
        held = os.stat(descriptor)
        if not stat.S_ISREG(held.st_mode):
            return False
        if below.endswith(_DELETED):
            return True
        with tree.borrow_root(below) as root:
            found = os.stat(below, dir_fd=root, follow_symlinks=False)
    except (OSError, SandboxError):
        return False
    return held.st_ino == found.st_ino
