"""The work dir: made private, or pinned by the caller and then never removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import SandboxPathError
from union.sandbox._core.paths import shown_path, work_path
from union.sandbox._linux import kernel
from union.sandbox._linux.removal import remove_tree
from union.sandbox._linux.tree import WorkTree
from union.sandbox.errors import PolicyError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from union.sandbox.on_device._read_only import ReadOnly

__all__ = ["WorkDir", "WorkPlace", "is_allowed", "not_allowed"]

_RESERVED: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/tmp",  # noqa: S108 - a name, not a file
)  # fmt: skip
"""Directories with a meaning of their own inside; a work dir may lie below, not stand for one."""
_PREFIX: Final = "sandbox-"
_SWEEP_AFTER_S: Final = 60.0
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
"""Not below /tmp if it can be helped: that is empty inside. else it is the system's choice."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """Where private work dirs are made, and where a sandbox sees its own, if not there."""

    directory: str
    shown_at: str | None = None
    allowed: tuple[str, ...] | None = None
    """The paths that a session may name, with all below them; None is any."""


class WorkDir:
    """A directory, held by a descriptor from open to close.

    ``path`` is its name inside, ``source`` where it is on this host: usually the same.
    """

    def __init__(self, pinned: str | None, place: WorkPlace | None = None) -> None:
        self.is_ours = pinned is None
        self._lock: int | None = None
        if pinned is None:
            path, self._lock = _make(None if place is None else place.directory)
            self.path = path if place is None or place.shown_at is None else place.shown_at
        else:
            path = self.path = _checked(pinned)
        self._read_only: tuple[str, ...] = ()
        self.allowed = None if place is None else place.allowed
        self.source = os.path.realpath(path)
        try:
            self.tree = WorkTree(self.source)
            try:
                # What is held is what counts: a name may have come to mean something else.
                self.source, found = self.tree.where()
                if pinned is not None:
                    self.check_allowed(self.path, self.source, "host_work_dir")
            except BaseException:
                self.tree.close()
                raise
        except BaseException:
            if self._lock is not None:
                os.close(self._lock)
                os.rmdir(self.source)  # nobody knows of it yet
            raise
        self.identity = (found.st_dev, found.st_ino)
        self.owner = (found.st_uid, found.st_gid)
        self._tell_tree()

    def check_allowed(self, path: str, source: str, argument: str) -> None:
        """Raises if ``source``, the real place of ``path``, is not the caller's to name."""
        if self.allowed is not None and not is_allowed(source, self.allowed):
            raise not_allowed(argument, path)

    def keep(self, read_only: ReadOnly) -> None:
        """Never change or remove what is shown read-only below this directory."""
        top = self.source + "/"
        self._read_only = tuple(
            source[len(top) :] for source in read_only.sources if source.startswith(top)
        )
        self.tree.kept = frozenset(read_only.kept)

    def check_changeable(self, path: str) -> None:
        """Raise if ``path`` is, or lies below, something that is shown read-only.

        To replace it would remove its mount from the sandboxes that are running.
        """
        if not self._read_only:
            return
        below = work_path(path, work_dir=self.path, allow_root=True)
        for kept in self._read_only:
            if f"{below}/".startswith(f"{kept}/"):
                raise SandboxPathError(
                    f"{shown_path(path)} is shown read-only in this session ({kept}); it is not "
                    "changed",
                    path=path,
                    code="path-read-only",
                    hint=f"change {self.source}/{below} with the host's own tools, or open the "
                    "session without it in read_only_paths",
                )

    def give_to(self, uid: int, gid: int) -> None:
        """Makes the whole tree belong to another id; only for a directory of the session's own."""
        if self.owner != (uid, gid):
            self.tree.give_to(uid, gid)
            self.owner = (uid, gid)
            self._tell_tree()

    def _tell_tree(self) -> None:
        # Only root can give files away; of anybody else they are the right owner's already.
        self.tree.owner = self.owner if kernel.is_root() else None

    def remove(self) -> None:
        """Lets go; removes the directory if it was made for the session."""
        self.tree.close()
        if self.is_ours:
            remove_tree(self.source)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_allowed(path: str, allowed: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one.rstrip("/") + "/") for one in allowed)


def not_allowed(argument: str, path: str) -> PolicyError:
    return PolicyError(
        f"{argument}: {path} is not among the paths that this server lets clients use",
        argument=argument,
        hint="start the server with --allow-path for it, or for a directory above it",
    )


def _place() -> str:
    return _PREFERRED if os.access(_PREFERRED, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _make(place: str | None) -> tuple[str, int]:
    """A private directory, and the lock that tells others it is in use."""
    try:
        place = place or _place()  # fails where nothing can be written
        sweep(place)
        path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(path)
            raise
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.path.realpath(path), lock
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise SandboxUsageError(
            f"no work dir could be made: {exc.strerror}",
            argument="host_work_dir",
            hint="pass host_work_dir=, or set TMPDIR to a directory that can be written",
        ) from exc


@functools.cache
def sweep(place: str) -> None:
    """Removes what a host that was killed could not: work dirs of ours that nobody holds.

    Once per process and place. Only directories of our own uid whose maker is gone, or that are a
    minute old, so that one which is being made is left alone.
    """
    me, now = os.geteuid(), time.time()
    with os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody else swept it first
                found = entry.stat(follow_symlinks=False)
                old = now - found.st_mtime > _SWEEP_AFTER_S
                if found.st_uid == me and (old or _maker_is_gone(entry.name)):
                    _remove_if_unused(entry.path)


def _maker_is_gone(name: str) -> bool:
    pid = name.removeprefix(_PREFIX).partition("-")[0]
    return pid.isdecimal() and not os.path.exists(f"/proc/{pid}")


def _remove_if_unused(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # a session lives there
    else:
        remove_tree(path)
    finally:
        os.close(fd)


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
