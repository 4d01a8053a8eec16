"""Removing a whole tree that someone hostile has built: any depth, any mode, any name.

Rules of this file:

- Everything is named by a descriptor and one component; no link is followed, no path is joined.
- No recursion and at most three descriptors: a directory that is not empty is moved up to the
  top of the tree and emptied there, so depth costs neither stack nor descriptors.
- A mount point is never entered. rmdir comes before every descent and the kernel answers EBUSY
  for one; the open that follows refuses to cross a mount once more.
- What is in ``kept``, by device and inode, is neither removed, nor moved, nor entered.
- What cannot be removed is left, the rest is removed, and one error names the first of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from typing import Final

from union.sandbox._core.file_errors import (
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxNotADirectoryError,
    SandboxPathError,
)
from union.sandbox._core.paths import shown_path
from union.sandbox._linux.openat2 import PIN_DIR, open_beneath
from union.sandbox._system import IS_LINUX

__all__ = ["refuse_kept", "remove_entry", "remove_tree"]

_READ_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_TIMEOUT_S: Final = 300.0
_SHOWN_DEPTH: Final = 400


def remove_tree(path: str, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Remove the directory ``path`` and everything below it.

    Raises one `SandboxFileError` when something is left. A link at ``path`` is refused.

    Preconditions: the parent of ``path`` is not writable by the sandbox.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    if name in {"", ".", ".."}:
        msg = f"path={shown_path(path)} does not name a directory that can be removed"
        raise SandboxPathError(msg, path=path)
    try:
        at = os.open(parent or ("/" if path.startswith("/") else "."), PIN_DIR)
    except FileNotFoundError:
        raise _missing(path) from None
    try:
        remove_entry(at, os.fsencode(name), shown=path, timeout_s=timeout_s)
    finally:
        os.close(at)


def remove_entry(
    dir_fd: int,
    name: bytes,
    *,
    shown: str,
    timeout_s: float = _TIMEOUT_S,
    kept: frozenset[tuple[int, int]] = frozenset(),
) -> None:
    """Remove the directory ``name`` in ``dir_fd`` and everything below it, but what is ``kept``."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        raise _missing(shown) from None
    refuse_kept(found, kept, shown=shown)
    kind = found.st_mode
    if stat.S_ISLNK(kind):
        msg = f"{shown_path(shown)} is a symbolic link; it is neither followed nor removed"
        raise SandboxPathError(msg, path=shown, code="path-symlink")
    if not stat.S_ISDIR(kind):
        msg = f"{shown_path(shown)} is not a directory"
        raise SandboxNotADirectoryError(msg, path=shown)
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno not in _NOT_EMPTY:
            raise _left(exc, shown, count=1) from exc
    else:
        return
    try:
        top = _open_dir(dir_fd, name, kept)
    except OSError as exc:
        raise _left(exc, shown, count=1) from exc
    try:
        _Removal(top, shown=shown, deadline=time.monotonic() + timeout_s, kept=kept).run()
    finally:
        os.close(top)
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as exc:
        raise _left(exc, shown, count=1) from exc


def refuse_kept(found: os.stat_result, kept: frozenset[tuple[int, int]], *, shown: str) -> None:
    """Raise if this is to stay, whatever its name is by now."""
    if (found.st_dev, found.st_ino) in kept:
        raise _left(_stays(), shown, count=1)


class _Removal:
    """Empties one directory, in passes, until it is empty or a pass changes nothing."""

    def __init__(
        self, top: int, *, shown: str, deadline: float, kept: frozenset[tuple[int, int]]
    ) -> None:
        self._top = top
        self._kept = kept
        self._shown = shown
        self._deadline = deadline
        self._origin: dict[str, str] = {}  # name after the move up -> where it was
        self._progress = False
        self._first: tuple[OSError, str] | None = None
        self._failed = 0

    def run(self) -> None:
        while True:
            self._progress = False
            self._first, self._failed = None, 0
            seen = self._clear(self._top, self._shown)
            if not seen:
                return
            late = time.monotonic() > self._deadline
            if not self._progress and not late:
                break
            if late:
                msg = f"{shown_path(self._shown)} is still not empty; something keeps writing to it"
                raise SandboxFileError(
                    msg,
                    path=self._shown,
                    number=errno.ETIMEDOUT,
                    code="remove-incomplete",
                    hint="end the processes that use the directory, then remove it again",
                )
        raise self._failure()

    def _failure(self) -> SandboxFileError:
        if self._first is None:
            # Entries that came after the pass looked have no error of their own.
            busy = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            return _left(busy, self._shown, count=1)
        exc, where = self._first
        failure = _left(exc, where, count=self._failed)
        failure.__cause__ = exc
        return failure

    def _clear(self, fd: int, shown: str) -> int:
        """Remove or move up what is in ``fd``; return how many entries were seen."""
        seen = 0
        with os.scandir(fd) as entries:
            for entry in entries:
                seen += 1
                if time.monotonic() > self._deadline:
                    break
                try:
                    if self._kept:
                        self._check(fd, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        self._directory(fd, entry.name, shown)
                    else:
                        os.unlink(entry.name, dir_fd=fd)
                        self._progress = True
                except FileNotFoundError:
                    self._progress = True  # someone else removed it: just as well
                except OSError as exc:
                    self._failed += 1
                    if self._first is None:
                        self._first = (exc, self._where(fd, entry.name, shown))
        return seen

    def _check(self, fd: int, name: str) -> None:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if (found.st_dev, found.st_ino) in self._kept:
            raise _stays()

    def _directory(self, fd: int, name: str, shown: str) -> None:
        try:
            os.rmdir(name, dir_fd=fd)
        except OSError as exc:
            if exc.errno not in _NOT_EMPTY:
                raise
        else:
            self._progress = True
            self._origin.pop(name, None)
            return
        if fd != self._top:
            self._move_up(fd, name, shown)
        else:
            self._empty(name, self._where(fd, name, shown))

    def _empty(self, name: str, where: str) -> None:
        """Empty the directory ``name`` of the top and remove it if nothing is left in it."""
        fd = _open_dir(self._top, os.fsencode(name), self._kept)
        try:
            self._clear(fd, where)
        finally:
            os.close(fd)
        try:
            os.rmdir(name, dir_fd=self._top)
        except OSError as exc:
            # An entry left in it has its own error, or is new and handled by the next pass.
            if exc.errno not in _NOT_EMPTY:
                raise
        else:
            self._progress = True
            self._origin.pop(name, None)

    def _move_up(self, fd: int, name: str, shown: str) -> None:
        new = f".removed-{secrets.token_hex(12)}"
        try:
            os.rename(name, new, src_dir_fd=fd, dst_dir_fd=self._top)
        except PermissionError:
            # Moving a directory rewrites its "..", so the kernel asks for write access to it.
            os.close(_open_dir(fd, os.fsencode(name), self._kept))
            os.rename(name, new, src_dir_fd=fd, dst_dir_fd=self._top)
        self._progress = True
        self._origin[new] = self._where(fd, name, shown)

    def _where(self, fd: int, name: str, shown: str) -> str:
        if fd == self._top and name in self._origin:
            return self._origin[name]
        # Bounded: a hostile tree is deep, and each level would carry the whole of its path.
        return f"{shown[:_SHOWN_DEPTH]}/{name}"


def _open_dir(dir_fd: int, name: bytes, kept: frozenset[tuple[int, int]]) -> int:
    """Open a directory for reading and make sure that its entries can be removed."""
    try:
        fd = open_beneath(dir_fd, name, flags=_READ_DIR, same_mount=True)
    except PermissionError:
        if not IS_LINUX:
            return _open_after_chmod(dir_fd, name, kept)
        pinned = open_beneath(dir_fd, name, flags=PIN_DIR, same_mount=True)
        try:
            _check_opened(pinned, kept)
            # fchmod refuses an O_PATH descriptor; its proc entry leads to that very inode,
            # whatever the name means by now.
            os.chmod(f"/proc/self/fd/{pinned}", stat.S_IRWXU)
            return open_beneath(pinned, b".", flags=_READ_DIR)
        finally:
            os.close(pinned)
    try:
        _check_opened(fd, kept)
        if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            # Someone else's directory may still let us remove; if not, unlink will say so.
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, stat.S_IRWXU)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_after_chmod(dir_fd: int, name: bytes, kept: frozenset[tuple[int, int]]) -> int:
    """Open a directory whose mode denies it, on a system without O_PATH.

    A link that has taken the name meanwhile has its own mode changed, which has no effect.
    """
    found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if (found.st_dev, found.st_ino) in kept:
        raise _stays()
    os.chmod(name, stat.S_IRWXU, dir_fd=dir_fd, follow_symlinks=False)
    fd = open_beneath(dir_fd, name, flags=_READ_DIR, same_mount=True)
    try:
        _check_opened(fd, kept)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_opened(fd: int, kept: frozenset[tuple[int, int]]) -> None:
    """Once more for what was opened: the name may have changed hands since it was looked at."""
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) in kept:
        raise _stays()


def _stays() -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS))


def _missing(path: str) -> SandboxFileNotFoundError:
    return SandboxFileNotFoundError(f"{shown_path(path)} does not exist", path=path)


def _left(exc: OSError, where: str, *, count: int) -> SandboxFileError:
    more = f" (and {count - 1} more)" if count > 1 else ""
    reason = exc.strerror or str(exc)
    if exc.errno in {errno.EBUSY, errno.EXDEV}:
        reason = "it is a mount point"
    elif exc.errno == errno.EROFS:
        reason = "it, or something below it, is shown read-only, or its file system is read-only"
    return SandboxFileError(
        f"could not remove {shown_path(where)}{more}: {reason}",
        path=where,
        number=exc.errno,
        code="remove-incomplete",
    )
