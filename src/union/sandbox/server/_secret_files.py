"""Files with secrets: refused if other users can change or read them."""

from __future__ import annotations

import os
import stat
from typing import Final

from union.sandbox.errors import SandboxUsageError

__all__ = ["check_secret_file", "read_secret"]

MAX_BYTES: Final = 4096
_MAX_LINKS: Final = 40
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


def read_secret(
    argument: str,
    path: str,
    *,
    is_secret: bool,
    max_bytes: int = MAX_BYTES,
    encoding: str = "ascii",
) -> str:
    """Return the text of a token or digest file, without its one line end.

    Args:
        argument: Option that names the file, for errors.
        path: Path of the file.
        is_secret: Whether other users must not read it; a digest may be readable.
        max_bytes: Largest accepted size. Default: 4096.
        encoding: Encoding of its text. Default: ``"ascii"``.

    Raises:
        SandboxUsageError: It cannot be read, is too large or is not text in this encoding, or other
            users can change or read it.

    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as exc:
        raise _unusable(argument, path, str(exc.strerror)) from exc
    data = b""
    try:
        _check(argument, path, os.fstat(fd), is_secret=is_secret)
        while len(data) <= max_bytes and (piece := os.read(fd, max_bytes + 1)):
            data += piece
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise _unusable(argument, path, f"it holds more than {max_bytes} bytes")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        # Without the cause, which holds the content of the file.
        raise _unusable(argument, path, f"it is not {encoding.upper()} text") from None


def check_secret_file(argument: str, path: str, *, is_secret: bool) -> None:
    """Check a file that another library reads, such as a private key.

    Raises:
        SandboxUsageError: It is not there, or other users can change or read it.

    """
    try:
        found = os.stat(path)
    except OSError as exc:
        raise _unusable(argument, path, str(exc.strerror)) from exc
    _check(argument, path, found, is_secret=is_secret)


def _unusable(argument: str, path: str, why: str, hint: str = "") -> SandboxUsageError:
    return SandboxUsageError(f"{argument} {path}: {why}", argument=argument, hint=hint)


def _is_trusted(owner: int) -> bool:
    return owner in {0, os.geteuid()}


def _check(argument: str, path: str, found: os.stat_result, *, is_secret: bool) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not _is_trusted(found.st_uid):
        raise _unusable(
            argument,
            path,
            f"it belongs to user {found.st_uid}, not to root or to user {os.geteuid()}",
            f"chown {os.geteuid()} {path}",
        )
    if stat.S_ISFIFO(found.st_mode):
        return  # The shell passes a FIFO for --token-file <(command).
    if not stat.S_ISREG(found.st_mode):
        raise _unusable(argument, path, "it is not a regular file")
    if mode & _WRITABLE:
        raise _unusable(
            argument,
            path,
            f"other users can change it (mode {mode:04o}); accepted are 0600, 0400 and 0640",
            f"chmod 600 {path}",
        )
    is_reachable = _check_path(argument, path)
    if is_secret and mode & stat.S_IROTH and is_reachable:
        raise _unusable(
            argument,
            path,
            f"every user can read it (mode {mode:04o}); accepted are 0600, 0400 and 0640",
            f"chmod 600 {path}; for a Kubernetes secret set defaultMode: 0400",
        )


def _check_path(argument: str, path: str) -> bool:
    """Check every directory and link of a path; return whether other users can traverse it.

    Users who can write to a directory can replace the file, unless the directory is sticky. The
    owner of a link can change its target.
    """
    is_reachable = True
    pending = os.path.abspath(path).split("/")[1:]
    at, links = "/", 0
    while pending:
        is_reachable = _check_directory(argument, path, at) and is_reachable
        name = pending.pop(0)
        if name in {"", "."}:
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, name)
        try:
            found = os.lstat(step)
            target = os.readlink(step) if stat.S_ISLNK(found.st_mode) else None
        except OSError as exc:
            raise _unusable(argument, path, str(exc.strerror)) from exc
        if target is None:
            at = step
            continue
        links += 1
        if not _is_trusted(found.st_uid) or links > _MAX_LINKS:
            raise _unusable(
                argument,
                path,
                f"the symbolic link {step} in its path belongs to user {found.st_uid}",
            )
        pending[:0] = target.split("/")
        at = "/" if target.startswith("/") else at
    return is_reachable


def _check_directory(argument: str, path: str, directory: str) -> bool:
    try:
        found = os.stat(directory)
    except OSError as exc:
        raise _unusable(argument, path, str(exc.strerror)) from exc
    mode = stat.S_IMODE(found.st_mode)
    if not _is_trusted(found.st_uid) or (mode & _WRITABLE and not mode & stat.S_ISVTX):
        raise _unusable(
            argument,
            path,
            f"other users can change the directory {directory} (user {found.st_uid}, "
            f"mode {mode:04o})",
            f"chmod go-w {directory}, or move the file to a directory of your own",
        )
    return bool(mode & stat.S_IXOTH)
