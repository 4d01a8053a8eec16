"""Write a file atomically: under a temporary name, renamed when complete.

The temporary file is in the directory of the target. A hard link or an open descriptor of the old
file keeps the old content, and a reader sees the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._core.file_errors import not_regular_error
from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

__all__ = ["FileWriter", "Owner", "Tree", "as_byte_view", "check_mode", "make_temporary_name"]

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_WRITE_BYTES: Final = 1024 * 1024 * 1024  # the kernel writes less than 2 GiB per call

Owner = tuple[int, int]
"""User id and group id."""


class Tree(Protocol):
    """A directory tree that files are written to."""

    @property
    def applies_umask(self) -> bool:
        """Whether the umask of this process applies to new files."""
        ...

    @property
    def owner(self) -> Owner | None:
        """The owner of new files; None for this process's ids."""
        ...

    def shown(self, rel: str) -> str:
        """Return ``rel`` as error messages show it."""
        ...

    def borrow_root(self, rel: str) -> AbstractContextManager[int]:
        """Lend the root descriptor for work on ``rel``; translate its errors."""
        ...

    def open_parent(self, root: int, rel: str) -> tuple[int, bytes]:
        """Open the parent directory of ``rel``, which the caller closes; return it and the name."""
        ...

    def rename_new(self, dir_fd: int, source: bytes, target: bytes) -> None:
        """Rename within one directory; raise ``FileExistsError`` if the target exists."""

    def writer_closed(self, writer: FileWriter) -> None:
        """Handle the end of a writer: committed or aborted."""


class FileWriter:
    """Write one file: ``put`` in one call, or ``write`` chunks and then ``commit``.

    Call ``abort`` after any failure. Nothing is created before the first call. The calls may come
    from different threads, one after the other. ``abort`` may come at any time; later calls raise.
    """

    def __init__(self, tree: Tree, rel: str, *, mode: int, overwrite: bool) -> None:
        check_mode(mode)
        self._tree = tree
        self._rel = rel
        self._mode = mode
        self._overwrite = overwrite
        self._lock = threading.Lock()
        self._is_closed = False
        self._parent = self._fd = -1
        self._leaf = b""
        self._temporary = make_temporary_name()
        self._written = 0

    def put(self, chunks: Iterable[bytes | memoryview]) -> int:
        """Write all chunks and commit; return the size."""
        with self._tree.borrow_root(self._rel) as root, self._lock:
            self._begin(root)
            for chunk in chunks:
                self._add(chunk)
            return self._commit()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append a chunk."""
        with self._tree.borrow_root(self._rel) as root, self._lock:
            self._begin(root)
            self._add(chunk)

    def commit(self) -> int:
        """Rename the file to its target; return its size."""
        with self._tree.borrow_root(self._rel) as root, self._lock:
            self._begin(root)
            return self._commit()

    def abort(self) -> None:
        """Remove the temporary file. Does nothing after ``commit``."""
        with self._lock:
            if self._is_closed:
                return
            try:
                if self._fd >= 0:
                    # Sandboxed code may have removed the name or replaced it by a directory, which
                    # then stays.
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(self._temporary, dir_fd=self._parent)
            finally:
                self._finish()

    def _begin(self, root: int) -> None:
        if self._is_closed:
            raise SessionClosedError("the session was closed while a file was being written")
        if self._fd < 0:
            self._parent, self._leaf = self._tree.open_parent(root, self._rel)
            self._check_target()
            mode = self._mode if self._tree.applies_umask else 0o600
            self._fd = os.open(self._temporary, _NEW_FILE, mode, dir_fd=self._parent)

    def _add(self, chunk: bytes | memoryview) -> None:
        rest = memoryview(chunk)
        self._written += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest[:_MAX_WRITE_BYTES]) :]

    def _commit(self) -> int:
        if self._tree.owner is not None:
            os.fchown(self._fd, *self._tree.owner)
        if not self._tree.applies_umask:
            os.fchmod(self._fd, self._mode)
        if self._overwrite:
            # Check again: a link created meanwhile is refused, not replaced. One created after
            # this check is replaced; its target is never touched.
            self._check_target()
            parent = self._parent
            os.rename(self._temporary, self._leaf, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            self._tree.rename_new(self._parent, self._temporary, self._leaf)
        self._finish()
        return self._written

    def _finish(self) -> None:
        self._is_closed = True
        self._tree.writer_closed(self)
        for fd in (self._fd, self._parent):
            if fd >= 0:
                os.close(fd)

    def _check_target(self) -> None:
        try:
            found = os.stat(self._leaf, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._leaf)
        if not stat.S_ISREG(found.st_mode):
            raise not_regular_error(found.st_mode, self._tree.shown(self._rel))
        if not self._overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._leaf)


def make_temporary_name() -> bytes:
    """Return a name that cannot be guessed."""
    return b".put-" + secrets.token_hex(12).encode()


def check_mode(mode: object) -> None:
    """Raise unless ``mode`` consists of permission bits only."""
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o777:
        shown = oct(mode) if isinstance(mode, int) else repr(mode)
        msg = f"mode must be permission bits from 0o000 to 0o777, not {shown}"
        raise SandboxUsageError(
            msg, argument="mode", hint="set-user-id, set-group-id and sticky bits are not supported"
        )


def as_byte_view(data: object) -> memoryview:
    """Return a view of the bytes of a bytes-like object, without a copy where possible."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # checked by the call itself
    except TypeError:
        msg = f"data must be bytes-like, not {type(data).__name__}"
        from union.sandbox._core.suggestions import remedy

        is_text = isinstance(data, str)
        hint = "encode it first: data.encode()" if is_text else remedy("data", data)
        raise SandboxUsageError(msg, argument="data", hint=hint) from None
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
