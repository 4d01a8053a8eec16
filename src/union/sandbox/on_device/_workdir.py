"""The work dir: made private, or pinned by the caller and then never removed."""

from __future__ import annotations

import os
import stat
import tempfile
from typing import Final

from union.sandbox._linux.removal import remove_tree
from union.sandbox._linux.tree import WorkTree
from union.sandbox.errors import PolicyError, SandboxUsageError

__all__ = ["WorkDir"]

_RESERVED: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/tmp",  # noqa: S108 - a name, not a file
)  # fmt: skip
"""Directories with a meaning of their own inside; a work dir may lie below, not stand for one."""
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
"""Not below /tmp if it can be helped: that is empty inside. else it is the system's choice."""


class WorkDir:
    """A directory, held by a descriptor from open to close."""

    def __init__(self, pinned: str | None) -> None:
        self.is_ours = pinned is None
        self.path = _make() if pinned is None else _checked(pinned)
        self.tree = WorkTree(os.path.realpath(self.path))
        found = os.stat(self.path)
        self.identity = (found.st_dev, found.st_ino)
        self.owner = (found.st_uid, found.st_gid)
        self.source = os.path.realpath(self.path)

    def give_to(self, uid: int, gid: int) -> None:
        """Makes the whole tree belong to another id; only for a directory of the session's own."""
        if self.owner != (uid, gid):
            self.tree.give_to(uid, gid)
            self.owner = (uid, gid)

    def remove(self) -> None:
        """Lets go; removes the directory if it was made for the session."""
        self.tree.close()
        if self.is_ours:
            remove_tree(self.path)


def _make() -> str:
    place = _PREFERRED if os.access(_PREFERRED, os.W_OK | os.X_OK) else None
    try:
        return os.path.realpath(tempfile.mkdtemp(prefix="sandbox-", dir=place))
    except OSError as exc:
        raise SandboxUsageError(
            f"no work dir could be made: {exc.strerror}",
            argument="host_work_dir",
            hint="pass host_work_dir=, or set TMPDIR to a directory that can be written",
        ) from exc


def _checked(path: str) -> str:
    path = os.path.normpath(path)
    try:
        found = os.stat(path)
    except OSError as exc:
        raise SandboxUsageError(
            f"host_work_dir: {path}: {exc.strerror}",
            argument="host_work_dir",
            hint="it must be an existing directory",
        ) from exc
    if not stat.S_ISDIR(found.st_mode):
        raise SandboxUsageError(
            f"host_work_dir must be a directory; {path} is not one", argument="host_work_dir"
        )
    for spelling in {path, os.path.realpath(path)}:
        if spelling == "/" or spelling in _RESERVED:
            raise PolicyError(
                f"host_work_dir={path!r} is a system directory; it cannot be a work dir",
                argument="host_work_dir",
                hint="use a directory of its own",
            )
    return path
