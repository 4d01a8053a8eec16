"""Directories that this package made for itself, and the removal of those that a crash left.

Rules of this file:

- Beside each directory is a marker file, which names the directory and its inode. The marker is
  outside the directory, so sandboxed code can neither write nor lock it.
- Every process that uses the directory holds a shared lock on the marker. The kernel releases it
  when the process ends, however it ends.
- `sweep` removes a directory only if its marker is ours, complete, describes exactly this directory
  and is not locked. A directory without a marker is never touched, whatever its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from typing import Final

from union.sandbox._linux.removal import remove_tree
from union.sandbox.errors import SandboxError

__all__ = ["OwnedDir", "disown", "sweep"]

_log = logging.getLogger("union.sandbox")
_SUFFIX: Final = ".lock"
_MARKER_NAME: Final = re.compile(r"(sandbox-[0-9]{1,10}-[0-9a-f]{16})\.lock", re.ASCII)
_TITLE: Final = "unionai-sandbox work dir, version 1"
_MARKER_BYTES: Final = 256
_ATTEMPTS: Final = 8


class OwnedDir:
    """A directory with its marker, held by a shared lock until it is released or removed."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def make(cls, place: str) -> OwnedDir:
        """Make a private directory below ``place``.

        Raises:
            OSError: ``place`` cannot be written, or has no locks.

        """
        for _ in range(_ATTEMPTS):
            name = f"sandbox-{os.getpid()}-{secrets.token_hex(8)}"
            path = os.path.join(os.path.realpath(place), name)
            lock = _new_marker(path)
            if lock is None:
                continue  # a sweep of another process was quicker, and has removed the marker
            try:
                os.mkdir(path, 0o700)
                try:
                    os.write(lock, _content(name, os.stat(path, follow_symlinks=False)))
                except BaseException:
                    os.rmdir(path)
                    raise
            except BaseException:
                os.unlink(path + _SUFFIX)
                os.close(lock)
                raise
            return cls(path, lock)
        raise OSError(errno.EAGAIN, f"no marker file could be kept in {place}")

    @classmethod
    def join(cls, path: str) -> OwnedDir:
        """Hold a directory that another process has made.

        Raises:
            OSError: it has no marker, or is being removed.

        """
        lock = _open_marker(path + _SUFFIX, fcntl.LOCK_SH)
        if lock is None:
            raise FileNotFoundError(errno.ENOENT, "the directory is being removed", path)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the directory with everything in it, then its marker.

        Raises:
            SandboxFileError: something is left; the marker stays, so a later sweep tries again.

        """
        try:
            try:
                remove_tree(self.path)
            except SandboxError:
                if os.path.lexists(self.path):
                    raise
                # Another program has removed it, before or meanwhile.
            self._remove_marker()
        finally:
            self.release()

    def remove_if_empty(self) -> None:
        """Remove the directory and its marker if nothing is in it; else leave both."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.path)
            self._remove_marker()
        self.release()

    def _remove_marker(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path + _SUFFIX)

    def release(self) -> None:
        """Stop holding the directory; a sweep may remove it from now on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(place: str) -> None:
    """Remove the directories below ``place`` that no living process holds.

    Blocks for as long as the removal takes. Failures are logged: the next sweep tries again.
    """
    try:
        names = os.listdir(place)
    except OSError as exc:
        _log.warning("left-over work dirs in %s could not be listed: %s", place, exc.strerror)
        return
    for name in names:
        if (found := _MARKER_NAME.fullmatch(name)) is None:
            continue
        try:
            _remove_if_unused(os.path.join(place, found[1]), found[1])
        except (OSError, SandboxError) as exc:
            _log.warning("left-over work dir %s/%s stays: %s", place, found[1], exc)


def disown(path: str) -> None:
    """Make sure that no sweep removes ``path`` or a directory above it: the caller uses it now.

    A left-over work dir that the caller names as its own loses its marker. One that a living
    session made keeps it: that session removes its own directory when it closes.

    Raises:
        BlockingIOError: a sweep is removing it at this moment.

    """
    while path != "/":
        if _MARKER_NAME.fullmatch(os.path.basename(path) + _SUFFIX) is not None:
            with contextlib.suppress(FileNotFoundError):
                _remove_marker_of(path)
        path = os.path.dirname(path)


def _remove_marker_of(path: str) -> None:
    if not _is_marker(os.lstat(path + _SUFFIX)):
        return
    if (lock := _open_marker(path + _SUFFIX, fcntl.LOCK_EX)) is not None:
        os.unlink(path + _SUFFIX)
    elif (lock := _open_marker(path + _SUFFIX, fcntl.LOCK_SH)) is None:
        # Sessions share the lock; only a sweep excludes others.
        raise BlockingIOError(errno.EAGAIN, "the directory is being removed", path)
    os.close(lock)


def _content(name: str, found: os.stat_result) -> bytes:
    return f"{_TITLE}\n{name} {found.st_dev} {found.st_ino}\n".encode("ascii")


def _new_marker(path: str) -> int | None:
    """Create and lock the marker of ``path``; None if a sweep has removed it before that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path + _SUFFIX, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        os.unlink(path + _SUFFIX)
        raise
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd


def _open_marker(path: str, lock: int) -> int | None:
    """Open and lock a marker; None if it is not ours, is locked by others, or was removed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not _is_marker(os.lstat(path)):  # before the open, which may act on what is not a file
        return None
    fd = os.open(path, flags)
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
        if _is_marker(os.fstat(fd)) and os.path.samestat(os.fstat(fd), os.lstat(path)):
            held, fd = fd, -1
            return held
    except (BlockingIOError, FileNotFoundError):
        pass  # in use, or removed by another sweep since it was opened
    finally:
        if fd >= 0:
            os.close(fd)
    return None


def _is_marker(found: os.stat_result) -> bool:
    return (
        stat.S_ISREG(found.st_mode)
        and stat.S_IMODE(found.st_mode) == stat.S_IRUSR | stat.S_IWUSR
        and found.st_uid == os.geteuid()
        and found.st_nlink == 1
        and found.st_size <= _MARKER_BYTES
    )


def _remove_if_unused(path: str, name: str) -> None:
    try:
        lock = _open_marker(path + _SUFFIX, fcntl.LOCK_EX)
    except FileNotFoundError:
        return  # another sweep has removed it
    if lock is None:
        return
    owned = OwnedDir(path, lock)
    try:
        content = os.pread(lock, _MARKER_BYTES + 1, 0)
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        owned.remove_if_empty()
        return
    except BaseException:
        owned.release()
        raise
    if not content:
        # The process ended while it made the directory: nothing can be in it yet.
        owned.remove_if_empty()
    elif stat.S_ISDIR(found.st_mode) and content == _content(name, found):
        owned.remove()
    else:
        owned.release()
        _log.warning("%s%s does not describe the directory beside it; both stay", path, _SUFFIX)
