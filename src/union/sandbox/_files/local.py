"""A directory of the caller's, from which a tree is taken or into which one is written.

Rules of this file:

- The directory itself is the caller's word: it is opened as it is named. Below it every component
  is opened by itself from the directory above, and a link is refused, also one that came just now.
- Nothing waits: files are opened non-blocking and must be regular before a byte is read.
- What is made obeys the umask, as with any program of the caller.

All methods block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox import constants
from union.sandbox._core.file_errors import translate_os_errors
from union.sandbox._files.listing import entries_of
from union.sandbox._files.reader import OldFile, read_whole
from union.sandbox._files.writer import NewFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.files import FileInfo

__all__ = ["LocalTree"]

_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LocalTree:
    """A directory by its descriptor: ``open()`` it first, ``close()`` it after the last call."""

    obeys_umask = True
    owner = None

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def open(self) -> None:
        """Take hold of the directory."""
        with translate_os_errors(self.path, argument="local"):
            self._fd = os.open(self.path, _READ_DIR)

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def put(self, rel: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        """Make ``rel`` a file with this content, atomically; return the number of bytes."""
        new = self.new_file(rel, mode=mode, overwrite=overwrite)
        try:
            return new.put((data,))
        except BaseException:
            new.abort()
            raise

    def new_file(self, rel: str, *, mode: int, overwrite: bool) -> NewFile:
        """Begin a file that is written in several calls."""
        return NewFile(self, rel, mode=mode, overwrite=overwrite)

    def get(self, rel: str, *, max_bytes: int) -> bytes:
        """Return the content of a regular file."""
        with self.entered(rel) as root:
            fd = self.open_file(root, rel)
            try:
                return read_whole(fd, self.named(rel), max_bytes=max_bytes)
            finally:
                os.close(fd)

    def old_file(self, rel: str, *, max_bytes: int) -> OldFile:
        """Begin to read a file in pieces."""
        return OldFile(self, rel, max_bytes=max_bytes)

    def list_dir(self, rel: str) -> tuple[FileInfo, ...]:
        """Describe what is in a directory; links are not followed."""
        with self.entered(rel) as root:
            fd = self._open_dir(root, _names(rel))
            try:
                return entries_of(fd, rel, max_entries=constants.MAX_DIR_ENTRIES)
            finally:
                os.close(fd)

    def make_dir(self, rel: str, *, parents: bool, exist_ok: bool) -> None:
        """Make a directory, with those above it if asked to."""
        with self.entered(rel) as root:
            *above, name = _names(rel)
            at = self._open_dir(root, above, create=parents)
            try:
                os.mkdir(name, dir_fd=at)
            except FileExistsError:
                if not exist_ok:
                    raise
                os.close(_step(at, name))  # a directory, or it says what it is
            finally:
                os.close(at)

    # What the files of this tree are made with.

    def named(self, rel: str) -> str:
        """How a path is shown in an error."""
        return os.path.join(self.path, rel)

    @contextlib.contextmanager
    def entered(self, rel: str) -> Iterator[int]:
        """Lend the descriptor for work on ``rel``, whose errors are put into our words."""
        with translate_os_errors(self.named(rel), argument="local"):
            yield self._fd

    def open_parent(self, root: int, rel: str) -> tuple[int, bytes]:
        """Open the directory that holds ``rel``, which must be there; the caller closes it."""
        *above, leaf = _names(rel)
        return self._open_dir(root, above), leaf

    def open_file(self, root: int, rel: str) -> int:
        """Open ``rel`` for reading; the caller closes it."""
        parent, leaf = self.open_parent(root, rel)
        try:
            return os.open(leaf, _READ_FILE, dir_fd=parent)
        finally:
            os.close(parent)

    def move_new(self, dir_fd: int, source: bytes, target: bytes) -> None:
        """Rename within one directory, unless the new name is taken."""
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        os.unlink(source, dir_fd=dir_fd)

    def over(self, new: NewFile) -> None:
        """Nothing is kept of files in the making: whoever copies ends them first."""

    @staticmethod
    def _open_dir(root: int, names: list[bytes], *, create: bool = False) -> int:
        at = os.dup(root)
        for name in names:
            try:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=at)
                below = _step(at, name)
            finally:
                os.close(at)
            at = below
        return at


def _step(dir_fd: int, name: bytes) -> int:
    """Open one directory, never through a link."""
    try:
        return os.open(name, _READ_DIR | os.O_NOFOLLOW, dir_fd=dir_fd)
    except NotADirectoryError:
        # With O_DIRECTORY a link is only "not a directory", on some systems.
        if stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _names(rel: str) -> list[bytes]:
    """The components of a path below the tree; ``"."`` has none."""
    if rel == ".":
        return []
    names = rel.encode("utf-8", "surrogateescape").split(b"/")
    if any(name in {b"", b".", b".."} for name in names):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), rel)
    return names
