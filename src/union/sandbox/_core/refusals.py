"""What the file system refuses, in the words of this package.

Errors are told apart by their number, never by their text, and each names the path as the
caller gave it.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import (
    SandboxFileAccessError,
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxNotRegularError,
    SandboxPathError,
)
from union.sandbox._core.paths import shown_path
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["not_a_file", "not_empty", "too_large", "translated"]


def not_a_file(mode: int, rel: str) -> SandboxFileError:
    """Return the error for a directory or special file where a file was expected."""
    if stat.S_ISDIR(mode):
        return SandboxIsADirectoryError(f"{shown_path(rel)} is a directory", path=rel)
    names = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    what = names.get(stat.S_IFMT(mode), "device")
    msg = f"{shown_path(rel)} is a {what}; only regular files are read or replaced"
    return SandboxNotRegularError(msg, path=rel)


def too_large(rel: str, *, size: int, max_bytes: int) -> SandboxFileTooLargeError:
    """Return the error for a file over the caller's limit, or over any machine's."""
    if size <= max_bytes:
        msg = f"{shown_path(rel)} has {size} bytes, more than this machine has memory"
        return SandboxFileTooLargeError(msg, path=rel)
    msg = f"{shown_path(rel)} has {size} bytes or more; max_bytes={max_bytes} are accepted"
    return SandboxFileTooLargeError(msg, path=rel, hint="raise max_bytes, or read it in parts")


def not_empty(rel: str) -> SandboxFileError:
    """Return the error for a directory that is not removed because something is in it."""
    return SandboxFileError(
        f"{shown_path(rel)} is a directory that is not empty",
        path=rel,
        number=errno.ENOTEMPTY,
        code="not-empty",
        hint="pass recursive=True to remove it with everything in it",
    )


_BY_ERRNO: Final[dict[int, tuple[type[SandboxFileError], str]]] = {
    errno.ENOENT: (SandboxFileNotFoundError, "does not exist"),
    errno.EEXIST: (SandboxFileExistsError, "exists already"),
    errno.EISDIR: (SandboxIsADirectoryError, "is a directory"),
    errno.ENOTDIR: (SandboxNotADirectoryError, "is not a directory, or goes through a file"),
    errno.ENXIO: (SandboxNotRegularError, "is a socket or a device; only regular files are read"),
    errno.ENODEV: (SandboxNotRegularError, "is a device; only regular files are read"),
    errno.EACCES: (SandboxFileAccessError, "cannot be used: its permission bits forbid it"),
    errno.EPERM: (SandboxFileAccessError, "cannot be used: the system forbids it"),
}


@contextlib.contextmanager
def translated(rel: str, *, argument: str = "path") -> Iterator[None]:
    """Turn what the kernel says about ``rel`` into an error of this package."""
    try:
        yield
    except SandboxError:
        raise
    except OSError as exc:
        shown = shown_path(rel)
        if exc.errno == errno.ELOOP:
            msg = f"{shown} is a symbolic link or goes through one; links are not followed"
            raise SandboxPathError(msg, path=rel, argument=argument, code="path-symlink") from exc
        if exc.errno == errno.EXDEV:
            msg = f"{shown} leads out of the directory that it must stay in"
            raise SandboxPathError(msg, path=rel, argument=argument) from exc
        if exc.errno == errno.EAGAIN:
            msg = f"{shown} kept changing while it was being opened"
            raise SandboxFileError(msg, path=rel, number=exc.errno, code="file-busy") from exc
        if exc.errno == errno.ENOTEMPTY:
            raise not_empty(rel) from exc
        if exc.errno in _BY_ERRNO:
            kind, reason = _BY_ERRNO[exc.errno]
            raise kind(f"{shown} {reason}", path=rel, number=exc.errno) from exc
        msg = f"{shown}: {exc.strerror or exc}"
        raise SandboxFileError(msg, path=rel, number=exc.errno) from exc
