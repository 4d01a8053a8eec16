"""A file that gets its name only when it is whole.

The content goes to a new file with a name of its own, beside the one that is wanted; then it takes
that name. A hard link or a second descriptor of the old file keeps the old content, and whoever
looks sees the old file or the new one, never a part.
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

__all__ = ["NewFile", "Owner", "Tree", "bytes_of", "check_mode", "temporary_name"]

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_PER_CALL: Final = 1024 * 1024 * 1024  # one write moves a little under 2 GiB

Owner = tuple[int, int]


class Tree(Protocol):
    """Where files come to be."""

    @property
    def obeys_umask(self) -> bool:
        """Whether the process's umask is taken off the mode of what is made."""
        ...

    @property
    def owner(self) -> Owner | None:
        """Whose the files are, if not this process's."""
        ...

    def named(self, rel: str) -> str:
        """How a path is shown in an error."""
        ...

    def entered(self, rel: str) -> AbstractContextManager[int]:
        """Lend the root for work on ``rel``, whose errors are put into our words."""
        ...

    def open_parent(self, root: int, rel: str) -> tuple[int, bytes]:
        """Open the directory of ``rel``, which the caller closes, and tell its name there."""
        ...

    def move_new(self, dir_fd: int, source: bytes, target: bytes) -> None:
        """Rename, failing with ``FileExistsError`` if the target is there."""

    def over(self, new: NewFile) -> None:
        """Be told that the file has its name, or was given up."""


class NewFile:
    """One file in the making: ``put`` it in one call; or ``write`` pieces, then ``commit``.

    When anything fails, ``abort``. Nothing is touched before the first call. The calls may come
    from different threads, one after the other; ``abort`` may come at any moment, and what follows
    it is refused.
    """

    def __init__(self, tree: Tree, rel: str, *, mode: int, overwrite: bool) -> None:
        check_mode(mode)
        self._tree = tree
        self._rel = rel
        self._mode = mode
        self._overwrite = overwrite
        self._lock = threading.Lock()
        self._over = False
        self._parent = self._fd = -1
        self._leaf = b""
        self._temporary = temporary_name()
        self._written = 0

    def put(self, chunks: Iterable[bytes | memoryview]) -> int:
        """Write everything and give the file its name; return its size."""
        with self._tree.entered(self._rel) as root, self._lock:
            self._begin(root)
            for chunk in chunks:
                self._add(chunk)
            return self._commit()

    def write(self, chunk: bytes | memoryview) -> None:
        """Add a piece."""
        with self._tree.entered(self._rel) as root, self._lock:
            self._begin(root)
            self._add(chunk)

    def commit(self) -> int:
        """Give the file its name; return its size."""
        with self._tree.entered(self._rel) as root, self._lock:
            self._begin(root)
            return self._commit()

    def abort(self) -> None:
        """Leave nothing. After ``commit`` this does nothing."""
        with self._lock:
            if self._over:
                return
            try:
                if self._fd >= 0:
                    # The sandbox may have taken the name away or put a directory there; that is
                    # its own then.
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(self._temporary, dir_fd=self._parent)
            finally:
                self._finish()

    def _begin(self, root: int) -> None:
        if self._over:
            raise SessionClosedError("the session was closed while a file was being written")
        if self._fd < 0:
            self._parent, self._leaf = self._tree.open_parent(root, self._rel)
            self._check_target()
            mode = self._mode if self._tree.obeys_umask else 0o600
            self._fd = os.open(self._temporary, _NEW_FILE, mode, dir_fd=self._parent)

    def _add(self, chunk: bytes | memoryview) -> None:
        rest = memoryview(chunk)
        self._written += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest[:_MOST_PER_CALL]) :]

    def _commit(self) -> int:
        if self._tree.owner is not None:
            os.fchown(self._fd, *self._tree.owner)
        if not self._tree.obeys_umask:
            os.fchmod(self._fd, self._mode)
        if self._overwrite:
            # Once more: a link that came since is refused, not replaced. A later one is replaced,
            # and what it points to is not touched either way.
            self._check_target()
            parent = self._parent
            os.rename(self._temporary, self._leaf, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            self._tree.move_new(self._parent, self._temporary, self._leaf)
        self._finish()
        return self._written

    def _finish(self) -> None:
        self._over = True
        self._tree.over(self)
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
            raise not_regular_error(found.st_mode, self._tree.named(self._rel))
        if not self._overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._leaf)


def temporary_name() -> bytes:
    """A name that nothing has."""
    return b".put-" + secrets.token_hex(12).encode()


def check_mode(mode: object) -> None:
    """Refuse what is more than permission bits."""
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o777:
        shown = oct(mode) if isinstance(mode, int) else repr(mode)
        msg = f"mode={shown} is not accepted; permission bits from 0o000 to 0o777 are"
        raise SandboxUsageError(
            msg, argument="mode", hint="set-user-id, set-group-id and sticky bits cannot be put"
        )


def bytes_of(data: object) -> memoryview:
    """The bytes of anything bytes-like, without a copy where that is possible."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # the question is whether it is one
    except TypeError:
        msg = f"data must be bytes-like, not {type(data).__name__}"
        from union.sandbox._core.suggestions import remedy

        is_text = isinstance(data, str)
        hint = "encode it first: data.encode()" if is_text else remedy("data", data)
        raise SandboxUsageError(msg, argument="data", hint=hint) from None
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
