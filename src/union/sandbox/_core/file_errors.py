"""Errors of file work in a work dir: each is a `SandboxError` and the builtin that fits.

::

    SandboxFileError                  OSError             anything else the file system refused
    ├── SandboxPathError              PermissionError     outside the work dir, or through a link
    ├── SandboxFileNotFoundError      FileNotFoundError
    ├── SandboxFileExistsError        FileExistsError
    ├── SandboxIsADirectoryError      IsADirectoryError
    ├── SandboxNotADirectoryError     NotADirectoryError
    ├── SandboxNotRegularError        PermissionError     a FIFO, socket or device
    ├── SandboxFileAccessError        PermissionError     the permission bits say no
    └── SandboxFileTooLargeError      OSError (EFBIG)

``errno`` and ``filename`` are set as on any ``OSError``; ``code`` is stable across releases.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, ClassVar

from union.sandbox.errors import SandboxError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable

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
]


def _rebuild(
    cls: type[SandboxFileError],
    args: tuple[Any, ...],
    state: dict[str, Any],
    number: int,
    filename: str,
) -> SandboxFileError:
    # Not ``cls.__new__``: where ValueError comes first in the MRO, its ``__new__`` is found and
    # refuses the larger layout of an OSError.
    exc = OSError.__new__(cls)
    exc.args = args
    exc.__dict__.update(state)
    exc.errno = number
    exc.filename = filename
    return exc


class SandboxFileError(SandboxError, OSError):
    """The file system refused; ``errno`` says how, ``filename`` is the path as given."""

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
    """The path leaves the work dir, or goes through a symbolic link."""

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
    """Nothing has this name."""

    code = "file-not-found"
    default_errno = errno.ENOENT


class SandboxFileExistsError(SandboxFileError, FileExistsError):
    """The name is taken and the call may not replace it."""

    code = "file-exists"
    default_errno = errno.EEXIST


class SandboxIsADirectoryError(SandboxFileError, IsADirectoryError):
    """A directory is where a file was expected."""

    code = "is-a-directory"
    default_errno = errno.EISDIR


class SandboxNotADirectoryError(SandboxFileError, NotADirectoryError):
    """Something else is where a directory was expected."""

    code = "not-a-directory"
    default_errno = errno.ENOTDIR


class SandboxNotRegularError(SandboxFileError, PermissionError):
    """A FIFO, a socket or a device: neither read nor replaced."""

    code = "not-regular"
    default_errno = errno.EPERM


class SandboxFileAccessError(SandboxFileError, PermissionError):
    """The permission bits do not let this process in."""

    code = "file-access"
    default_errno = errno.EACCES


class SandboxFileTooLargeError(SandboxFileError):
    """The file is larger than the caller allows."""

    code = "file-too-large"
    default_errno = errno.EFBIG
