"""A directory of the caller, as source or target of ``upload()`` and ``download()``.

Rules of this file:

- The path of the directory itself is trusted, links included. Below it every component is opened
  separately from its parent directory, and links are refused, so that a race cannot insert one.
- Opening never blocks: files are opened with O_NONBLOCK and must be regular before they are read.
- New files obey the umask, as files of any program of the caller do.

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
from union.sandbox._files.listing import list_entries
from union.sandbox._files.reader import FileReader, read_whole
from union.sandbox._files.writer import FileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.files import FileInfo

__all__ = ["LocalTree"]

_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PIN: Final = getattr(os, "O_PATH", 0)
"""0 on systems without O_PATH."""


class LocalTree:
    """A directory by its descriptor: ``open()`` it first, ``close()`` it after the last call."""

    applies_umask = True
    owner = None

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def open(self) -> None:
        """Open the directory."""
        with translate_os_errors(self.path, argument="local"):
            self._fd = os.open(self.path, _READ_DIR)

    def close(self) -> None:
        """Close the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def put(self, rel: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        """Write a file atomically; return the number of bytes."""
        new = self.open_writer(rel, mode=mode, overwrite=overwrite)
        try:
            return new.put((data,))
        except BaseException:
            new.abort()
            raise

    def open_writer(self, rel: str, *, mode: int, overwrite: bool) -> FileWriter:
        """Begin a file that is written in several calls."""
        return FileWriter(self, rel, mode=mode, overwrite=overwrite)

    def get(self, rel: str, *, max_bytes: int) -> bytes:
        """Return the content of a regular file."""
        with self.borrow_root(rel) as root:
            fd = self.open_file(root, rel)
            try:
                return read_whole(fd, self.shown(rel), max_bytes=max_bytes)
            finally:
                os.close(fd)

    def open_reader(self, rel: str, *, max_bytes: int) -> FileReader:
        """Return a reader for one file."""
        return FileReader(self, rel, max_bytes=max_bytes)

    def list_dir(self, rel: str) -> tuple[FileInfo, ...]:
        """Describe the entries of a directory; links are not followed."""
        with self.borrow_root(rel) as root:
            fd = self._open_dir(root, _names(rel))
            try:
                return list_entries(fd, rel, max_entries=constants.MAX_DIR_ENTRIES)
            finally:
                os.close(fd)

    def make_dir(self, rel: str, *, parents: bool, exist_ok: bool) -> None:
        """Create a directory, with its parents if ``parents``."""
        with self.borrow_root(rel) as root:
            *above, name = _names(rel)
            at = self._open_dir(root, above, create=parents)
            try:
                os.mkdir(name, dir_fd=at)
            except FileExistsError:
                if not exist_ok:
                    raise
                try:
                    os.close(_step(at, name))  # raises if it is not a directory
                except NotADirectoryError as exc:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from exc
            finally:
                os.close(at)

    # For FileReader and FileWriter.

    def shown(self, rel: str) -> str:
        """Return ``rel`` as error messages show it."""
        return os.path.join(self.path, rel)

    @contextlib.contextmanager
    def borrow_root(self, rel: str) -> Iterator[int]:
        """Lend the root descriptor for work on ``rel``; translate its errors."""
        with translate_os_errors(self.shown(rel), argument="local"):
            yield self._fd

    def open_parent(self, root: int, rel: str) -> tuple[int, bytes]:
        """Open the existing parent directory of ``rel``; the caller closes it."""
        *above, leaf = _names(rel)
        return self._open_dir(root, above), leaf

    def open_file(self, root: int, rel: str) -> int:
        """Open ``rel`` for reading; the caller closes it."""
        parent, leaf = self.open_parent(root, rel)
        try:
            return os.open(leaf, _READ_FILE, dir_fd=parent)
        finally:
            os.close(parent)

    def rename_new(self, dir_fd: int, source: bytes, target: bytes) -> None:
        """Rename within one directory; raise ``FileExistsError`` if the target exists."""
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        os.unlink(source, dir_fd=dir_fd)

    def writer_closed(self, writer: FileWriter) -> None:
        """Do nothing: a copy closes its writers before it closes the tree."""

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
    """Open one directory; refuse a link."""
    try:
        # Pinned first: gVisor follows a link to a directory in spite of O_NOFOLLOW, unless it is
        # opened with O_PATH.
        pinned = os.open(name, _READ_DIR | os.O_NOFOLLOW | _PIN, dir_fd=dir_fd)
        if not _PIN:
            return pinned
        try:
            return os.open(b".", _READ_DIR, dir_fd=pinned)
        finally:
            os.close(pinned)
    except NotADirectoryError:
        # On some systems O_DIRECTORY reports a link as "not a directory".
        if stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _names(rel: str) -> list[bytes]:
    """Return the components of a path below the tree; ``"."`` has none."""
    if rel == ".":
        return []
    names = rel.encode("utf-8", "surrogateescape").split(b"/")
    if any(name in {b"", b".", b".."} for name in names):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), rel)
    return names
