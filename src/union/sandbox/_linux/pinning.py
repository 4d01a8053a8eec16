"""Resolving a path of the host by single components, among directories that sandboxed code writes.

Rules of this file:

- Every component is opened by a descriptor of its parent; the kernel follows no link.
- A link is followed here, by hand, only where sandboxed code cannot have made it.
- The result is a descriptor. Its place and its identity are read from it, never from a second
  look-up of the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import path_of
from union.sandbox._linux.openat2 import PIN, PIN_DIR
from union.sandbox._system import IS_LINUX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LinkInWritablePlaceError", "Pinned", "Places", "identity_of", "note_writable", "pin"]

Identity = tuple[int, int]
"""Device and inode."""
_STEP: Final = PIN | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_LINKS: Final = 40
_TRIES: Final = 8

_MAX_NOTED: Final = 256
_noted: Final[dict[Identity, str]] = {}
_lock: Final = threading.Lock()


def note_writable(identity: Identity, path: str) -> None:
    """Record a directory that a session of this process shows writable, for all later sessions."""
    with _lock:
        _noted.pop(identity, None)
        _noted[identity] = path
        while len(_noted) > _MAX_NOTED:
            del _noted[next(iter(_noted))]


def _noted_and_there() -> frozenset[Identity]:
    """Return what was noted and still exists: the inode of a removed directory is used again."""
    with _lock:
        for identity, path in tuple(_noted.items()):
            try:
                is_there = identity_of(os.stat(path)) == identity
            except OSError:
                is_there = False
            if not is_there:
                del _noted[identity]
        return frozenset(_noted)


def identity_of(found: os.stat_result) -> Identity:
    """Return the device and the inode."""
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class Places:
    """Directories that sandboxed code can write, and directories below them that it cannot."""

    writable: frozenset[Identity] = frozenset()
    read_only: frozenset[Identity] = frozenset()

    @classmethod
    def of(
        cls, writable: frozenset[Identity], read_only: frozenset[Identity] = frozenset()
    ) -> Places:
        """Return these places together with those that other sessions of this process show."""
        return cls(writable | _noted_and_there(), read_only)

    def inside(self, identity: Identity, *, was_inside: bool) -> bool:
        """Return whether sandboxed code can write here, given the answer for the parent."""
        if identity in self.read_only:
            return False
        return was_inside or identity in self.writable


class LinkInWritablePlaceError(OSError):
    """A path leads through a link that sandboxed code may have made."""

    def __init__(self, link: str, target: str) -> None:
        super().__init__(errno.ELOOP, "a link that sandboxed code may have made", link)
        self.link = link
        self.target = target


@dataclass(frozen=True, slots=True)
class Pinned:
    """The file that a path led to; valid within the ``pin`` block."""

    fd: int
    found: os.stat_result
    source: str
    """Its canonical place on the host."""
    is_writable_place: bool
    """Whether it lies in, or is, a directory that sandboxed code can write."""

    @property
    def handle(self) -> str:
        """A path that leads to this very file, where the system has such paths."""
        return f"/proc/self/fd/{self.fd}" if IS_LINUX else self.source

    @property
    def identity(self) -> Identity:
        return identity_of(self.found)


class _Walk:
    """The directories from the root to where the walk is."""

    def __init__(self, places: Places, check: Callable[[int, os.stat_result], None]) -> None:
        self._places = places
        self._check = check
        self._stack: list[tuple[int, os.stat_result, bool]] = []
        self.enter(os.open("/", _STEP))

    @property
    def here(self) -> tuple[int, os.stat_result, bool]:
        return self._stack[-1]

    def enter(self, fd: int) -> None:
        """Descend; the walk owns ``fd`` from here on."""
        try:
            found = os.fstat(fd)
            was_inside = bool(self._stack) and self.here[2]
            inside = self._places.inside(identity_of(found), was_inside=was_inside)
            self._check(fd, found)
        except BaseException:
            os.close(fd)
            raise
        self._stack.append((fd, found, inside))

    def up(self) -> None:
        if len(self._stack) > 1:
            os.close(self._stack.pop()[0])

    def top(self) -> None:
        while len(self._stack) > 1:
            self.up()

    def close(self) -> None:
        while self._stack:
            os.close(self._stack.pop()[0])


def _no_check(fd: int, found: os.stat_result) -> None:
    """Accept every component."""


@contextlib.contextmanager
def pin(
    path: str,
    places: Places,
    *,
    check: Callable[[int, os.stat_result], None] = _no_check,
) -> Iterator[Pinned]:
    """Resolve ``path`` and lend its descriptor.

    Args:
        path: any path of the host; a relative one begins at the current directory.
        places: where links are refused.
        check: called with every directory on the way and with the last component; it may raise.

    Raises:
        LinkInWritablePlaceError: a link on the way lies where sandboxed code can write.
        OSError: the path does not exist, or cannot be searched.

    """
    pending = os.path.join(os.getcwd(), path).split("/")[::-1]
    links = 0
    walk = _Walk(places, check)
    try:
        while pending:
            name = pending.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                walk.up()
                continue
            at, _, inside = walk.here
            fd, target = _opened(at, name)
            if fd is not None:
                walk.enter(fd)
                continue
            if inside:
                raise LinkInWritablePlaceError(f"{path_of(at)}/{name}", target)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            pending += target.split("/")[::-1]
            if target.startswith("/"):
                walk.top()
        fd, found, inside = walk.here
        yield Pinned(fd, found, path_of(fd), inside)
    finally:
        walk.close()


def _opened(at: int, name: str) -> tuple[int | None, str]:
    """Open one component; a link is not opened: None and its target."""
    if IS_LINUX:
        fd = os.open(name, _STEP, dir_fd=at)
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            return fd, ""
        try:
            return None, os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)
    return _opened_by_kind(at, name)


def _opened_by_kind(at: int, name: str) -> tuple[int | None, str]:
    """Do the same without O_PATH: what was opened must be what was looked at.

    Raises:
        PermissionError: a file on the way may not be read; without O_PATH it cannot be opened.
        OSError: ESTALE if the name changed between both calls, several times in a row.

    """
    for _ in range(_TRIES):
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        try:
            if stat.S_ISLNK(found.st_mode):
                return None, os.readlink(name, dir_fd=at)
            kind = PIN_DIR | os.O_NOFOLLOW if stat.S_ISDIR(found.st_mode) else _FILE
            fd = os.open(name, kind, dir_fd=at)
        except OSError as exc:
            if exc.errno in {errno.ELOOP, errno.ENOTDIR, errno.EINVAL}:
                continue  # it is a link now, or no directory or no link any more
            raise
        if identity_of(os.fstat(fd)) == identity_of(found):
            return fd, ""
        os.close(fd)
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
