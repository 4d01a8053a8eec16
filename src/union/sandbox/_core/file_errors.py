"""Errors of file operations: each is a `SandboxError` and the matching builtin.

::

    SandboxFileError                  OSError             any other error of the file system
    ├── SandboxPathError              PermissionError     outside the work dir, or through a link
    ├── SandboxFileNotFoundError      FileNotFoundError
    ├── SandboxFileExistsError        FileExistsError
    ├── SandboxIsADirectoryError      IsADirectoryError
    ├── SandboxNotADirectoryError     NotADirectoryError
    ├── SandboxNotRegularError        PermissionError     a FIFO, socket or device
    ├── SandboxFileAccessError        PermissionError     permission denied
    └── SandboxFileTooLargeError      OSError (EFBIG)

``errno`` and ``filename`` are set as on any ``OSError``; ``code`` is stable across releases.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from typing import TYPE_CHECKING, Any, ClassVar, Final

from union.sandbox.errors import SandboxError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "SandboxFileAccessError",
    "SandboxFileError",
    "SandboxFileExistsError",
    "SandboxFileNotFoundError",
    "SandboxFileTooLargeError",
    "SandboxIsADirectoryError",
    "SandboxNotADirectoryError",
    "SandboxNotRegularError",
    "SandboxPathError",
    "not_empty_error",
    "not_regular_error",
    "shown_path",
    "too_large_error",
    "translate_os_errors",
]


def _rebuild(
    cls: type[SandboxFileError],
    args: tuple[Any, ...],
    state: dict[str, Any],
    number: int,
    filename: str,
) -> SandboxFileError:
    # Not ``cls.__new__``: if ValueError comes first in the MRO, its ``__new__`` is used and
    # rejects the larger layout of an OSError.
    exc = OSError.__new__(cls)
    exc.args = args
    exc.__dict__.update(state)
    exc.errno = number
    exc.filename = filename
    return exc


class SandboxFileError(SandboxError, OSError):
    """A file operation failed; ``errno`` is the cause, ``filename`` the path as given."""

    code = "file"
    default_errno: ClassVar[int] = errno.EIO

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        number: int | None = None,
        code: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.errno = self.default_errno if number is None else number
        self.filename = path

    def __reduce__(self) -> tuple[Callable[..., SandboxError], tuple[Any, ...]]:
        # errno and filename live in the C structure of OSError, not in ``__dict__``.
        return _rebuild, (type(self), self.args, dict(self.__dict__), self.errno, self.filename)


class SandboxPathError(SandboxUsageError, SandboxFileError, PermissionError):
    """The path leads outside the work dir or goes through a symbolic link."""

    code = "path-outside"
    default_errno = errno.EPERM

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        argument: str = "path",
        code: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, argument=argument, code=code, hint=hint)
        self.filename = path


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """The path does not exist."""

    code = "file-not-found"
    default_errno = errno.ENOENT


class SandboxFileExistsError(SandboxFileError, FileExistsError):
    """The path exists and the call does not overwrite."""

    code = "file-exists"
    default_errno = errno.EEXIST


class SandboxIsADirectoryError(SandboxFileError, IsADirectoryError):
    """The path is a directory; a file was expected."""

    code = "is-a-directory"
    default_errno = errno.EISDIR


class SandboxNotADirectoryError(SandboxFileError, NotADirectoryError):
    """The path is not a directory; a directory was expected."""

    code = "not-a-directory"
    default_errno = errno.ENOTDIR


class SandboxNotRegularError(SandboxFileError, PermissionError):
    """The path is a FIFO, socket or device; these are neither read nor replaced."""

    code = "not-regular"
    default_errno = errno.EPERM


class SandboxFileAccessError(SandboxFileError, PermissionError):
    """The permission bits deny access to this process."""

    code = "file-access"
    default_errno = errno.EACCES


class SandboxFileTooLargeError(SandboxFileError):
    """The file is larger than the caller allows."""

    code = "file-too-large"
    default_errno = errno.EFBIG


_SHOWN_CHARACTERS: Final = 120


def shown_path(path: str) -> str:
    """Return ``path`` quoted for a message: printable, and not longer than a line."""
    if len(path) > _SHOWN_CHARACTERS:
        path = f"{path[: _SHOWN_CHARACTERS // 2]}...{path[-_SHOWN_CHARACTERS // 2 :]}"
    return ascii(path)


def not_regular_error(mode: int, rel: str) -> SandboxFileError:
    """Return the error for a directory or special file where a file was expected."""
    if stat.S_ISDIR(mode):
        return SandboxIsADirectoryError(f"{shown_path(rel)} is a directory", path=rel)
    names = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    what = names.get(stat.S_IFMT(mode), "device")
    msg = f"{shown_path(rel)} is a {what}; only regular files are read or replaced"
    return SandboxNotRegularError(msg, path=rel)


def too_large_error(rel: str, *, size: int, max_bytes: int) -> SandboxFileTooLargeError:
    """Return the error for a file that exceeds ``max_bytes`` or the memory of this machine."""
    if size <= max_bytes:
        msg = f"{shown_path(rel)} has {size} bytes, more than this machine has memory"
        return SandboxFileTooLargeError(msg, path=rel)
    msg = f"{shown_path(rel)} has at least {size} bytes; max_bytes={max_bytes}"
    return SandboxFileTooLargeError(msg, path=rel, hint="raise max_bytes, or read it in parts")


def not_empty_error(rel: str) -> SandboxFileError:
    """Return the error for removing a directory that is not empty."""
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
def translate_os_errors(rel: str, *, argument: str = "path") -> Iterator[None]:
    """Translate an ``OSError`` about ``rel`` into an error of this package, by its ``errno``."""
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
            msg = f"{shown} leads outside the directory that it must stay in"
            raise SandboxPathError(msg, path=rel, argument=argument) from exc
        if exc.errno == errno.EAGAIN:
            msg = f"{shown} kept changing while it was being opened"
            raise SandboxFileError(msg, path=rel, number=exc.errno, code="file-busy") from exc
        if exc.errno == errno.ENOTEMPTY:
            raise not_empty_error(rel) from exc
        if exc.errno in _BY_ERRNO:
            kind, reason = _BY_ERRNO[exc.errno]
            raise kind(f"{shown} {reason}", path=rel, number=exc.errno) from exc
        msg = f"{shown}: {exc.strerror or exc}"
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SandboxFileError(
                msg,
                path=rel,
                number=exc.errno,
                code="disk-full",
                hint="remove files from the work dir, or free space on its disk",
            ) from exc
        raise SandboxFileError(msg, path=rel, number=exc.errno) from exc
