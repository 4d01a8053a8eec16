"""Read-only paths inside directories that sandboxed code can write: pinned and watched.

A read-only mount alone protects a file or directory, not its name. If a directory above it can be
renamed, sandboxed code puts another one in its place, and the caller uses that. So every directory
between a writable mount and a read-only path becomes a mount of its own: the kernel refuses to
rename, replace or remove a mount point from inside (EBUSY).

From outside, the caller may replace such a file. The kernel then drops its mount in every sandbox.
Each sandbox therefore checks its mounts when it is prepared, and the session compares identities
before each command; see ``ReadOnlyPaths.is_intact``.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import host
from union.sandbox._linux.openat2 import PIN
from union.sandbox._linux.pinning import identity_of
from union.sandbox.errors import PolicyError, SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from union.sandbox._plan.rootfs import Shown

__all__ = ["ReadOnlyPaths", "refuse_on_tmpfs"]

_PIN: Final = PIN | os.O_NOFOLLOW | os.O_CLOEXEC


def refuse_on_tmpfs(shown: Iterable[Shown], *, uid: int) -> None:
    """Refuse read-only paths whose mode and times sandboxed code could change.

    For gVisor, where a read-only mount of a tmpfs does not protect these from the owner of a file.

    Raises:
        PolicyError: a read-only path is on a tmpfs and belongs to ``uid``, the id of the sandbox.

    """
    points = host.mount_points()
    for item in shown:
        if item.writable or not host.is_on_tmpfs(item.source, points):
            continue
        if os.stat(item.source).st_uid == uid:
            raise PolicyError(
                f"{item.path} cannot be shown read-only here: it is on a tmpfs and belongs to the "
                "id of sandboxed code, which could change its mode and times in gVisor",
                argument="read_only_paths",
                hint="keep it on another file system (the image, or a volume that is not in "
                "memory), or copy it into the work dir with upload()",
            )


class ReadOnlyPaths:
    """Read-only paths inside writable directories. Owns its file descriptors.

    It keeps everything open that it compares later: an inode in use is never assigned to a new
    file, so an identity cannot be reused.
    """

    def __init__(self) -> None:
        self.sources: set[str] = set()
        """Host paths of the read-only files and directories."""
        self.kept: set[tuple[int, int]] = set()
        """Identities of these and of the directories above them, up to the writable mount."""
        self._fds: list[int] = []
        self.watched: list[tuple[int, str, tuple[int, ...]]] = []

    def __del__(self) -> None:
        # An error may occur between the inspection of the host and the posture that owns this.
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        self.watched.clear()

    def is_intact(self) -> bool:
        """Return whether every path still has its identity; no link is followed."""
        for parent, name, stamp in self.watched:
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except OSError:
                return False
            if _stamp(found) != stamp:
                return False
        return True

    def protect(self, added: Iterable[Shown], *, strict: bool) -> list[Shown]:
        """Return the mounts, with those added that keep read-only paths in place.

        Args:
            added: the caller's paths, the interpreter and the work dir; one for each path.
            strict: refuse a single read-only file: its mount is lost when the caller replaces it.

        """
        out = {item.path: item for item in added}
        held: dict[str, int] = {}
        writable = [item for item in out.values() if item.writable and item.is_dir]
        read_only = [item for item in out.values() if not item.writable]
        # From the top: a path below another read-only path needs no mounts of its own.
        read_only.sort(key=lambda item: item.source.count("/"))
        for root in writable:
            for item in read_only:
                # Compared by real path: the caller may have named either of them through a link.
                if not item.source.startswith(root.source + "/"):
                    continue
                place = root.path + item.source[len(root.source) :]
                around = _nearest(place, out)
                if around is None or not around.writable:
                    continue
                if around.source + place[len(around.path) :] != item.source:
                    continue  # something else is mounted there
                if place in out and out[place].writable and not out[place].guard:
                    continue  # the caller made it writable by name
                if strict and not item.is_dir:
                    raise _not_strict(item, root)
                for one in self._mounts(around, item, place, held):
                    out.setdefault(one.path, one)
                    if one.path == place:
                        out[place] = one
        return list(out.values())

    def _mounts(
        self, around: Shown, item: Shown, place: str, held: dict[str, int]
    ) -> Iterable[Shown]:
        """Yield a mount for each directory from ``around`` to ``item``, and for ``item``."""
        if around.source not in held:
            held[around.source] = self._hold(os.open(around.source, _PIN))
            found = os.fstat(held[around.source])
            if around.identity[1] and identity_of(found) != around.identity:
                raise _replaced(around.source)
        at, source, path = held[around.source], around.source, around.path
        names = place[len(around.path) + 1 :].split("/")
        for depth, name in enumerate(names, 1):
            is_last = depth == len(names)
            source, path = f"{source}/{name}", f"{path}/{name}"
            parent = at
            if source not in held:
                try:
                    held[source] = self._hold(os.open(name, _PIN, dir_fd=parent))
                except (FileNotFoundError, NotADirectoryError) as exc:
                    raise _replaced(source) from exc
                self._watch(parent, name, held[source])
            at = held[source]
            found = os.fstat(at)
            self.kept.add(identity_of(found))
            if is_last:
                if item.identity[1] and identity_of(found) != item.identity:
                    raise _replaced(source)
                self.sources.add(source)
                yield dataclasses.replace(item, path=path, identity=identity_of(found), verify=True)
            elif not stat.S_ISDIR(found.st_mode):
                raise _replaced(source)
            else:
                yield dataclasses.replace(
                    around,
                    source=source,
                    path=path,
                    identity=identity_of(found),
                    guard=True,
                    verify=True,
                )

    def _hold(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _watch(self, parent: int, name: str, fd: int) -> None:
        self.watched.append((parent, name, _stamp(os.fstat(fd))))


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when a path is replaced, and when a file is linked anew.

    A file that is unlinked and linked again is the same inode without its mount. The times of a
    directory change with its entries, which is irrelevant here.
    """
    if stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _nearest(path: str, out: dict[str, Shown]) -> Shown | None:
    """Return the mount that contains ``path``, ignoring the mounts added here."""
    parent = path.rpartition("/")[0]
    while parent:
        item = out.get(parent)
        if item is not None and not item.guard:
            return item
        parent = parent.rpartition("/")[0]
    return None


def _not_strict(item: Shown, root: Shown) -> PolicyError:
    return PolicyError(
        f"strict=True: the file {item.source} is shown read-only in {root.source}, which is "
        "writable; a program that replaces the file (as editors do) removes that protection from "
        "commands that are running",
        argument="read_only_paths",
        hint="put the file into a directory and name the directory, keep it outside the writable "
        "directory, or drop strict=True",
    )


def _replaced(source: str) -> SandboxExecutionError:
    return SandboxExecutionError(
        f"{source} was replaced while a sandbox was being prepared",
        stage="spawn",
        code=f"spawn-{errno.errorcode[errno.ESTALE]}",
        hint="run the command again; if this repeats, another session or program keeps changing "
        "the directories above a read-only path",
    )
