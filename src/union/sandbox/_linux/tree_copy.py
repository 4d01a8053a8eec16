"""Copies of whole trees whose content is hostile, made and restored by descriptors.

A copy has the regular files, links and directories of a tree, with their modes and times. FIFOs,
sockets and devices are left out. No link is followed. Files that are linked several times become
files of their own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import SandboxFileError, translate_os_errors
from union.sandbox._core.paths import shown_path
from union.sandbox._linux.openat2 import open_beneath
from union.sandbox._linux.removal import remove_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NO_SPACE", "copy_tree", "restore_tree", "size_of"]

_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY
_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK: Final = 1 << 30
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_MAX_DEPTH: Final = 500
"""Directories below each other; each is open while those below it are copied."""


def copy_tree(source: int, target: int, *, owner: tuple[int, int] | None = None) -> None:
    """Copy what is in the directory ``source`` into the empty directory ``target``.

    Args:
        source: descriptor of a directory that does not change meanwhile.
        target: descriptor of a directory that no other process writes.
        owner: user and group of what is made; None for those of each source, if this is root.

    """
    with _opened(source, ".", _READ_DIR) as top:
        _Copy(owner).directory(top, target, depth=0)


def restore_tree(
    source: int,
    target: int,
    *,
    owner: tuple[int, int] | None = None,
    kept: frozenset[tuple[int, int]] = frozenset(),
) -> None:
    """Make the directory ``target`` equal to ``source``, a copy of its earlier state.

    Entries that are equal already, by kind, size, mode and bytes, stay as they are.
    """
    with _opened(source, ".", _READ_DIR) as top, _accessible(target, ".") as at:
        _Restore(owner, kept).directory(top, at, depth=0)


def size_of(path: str | int, *, strict: bool = False) -> int:
    """Return the bytes on disk of everything below a directory of the host.

    Args:
        path: the directory, or a descriptor of it.
        strict: raise for a directory that is unreadable, or deeper than a path can name; otherwise
            its content is not counted.

    """
    total = 0
    if isinstance(path, int):
        top = os.open(".", _READ_DIR | os.O_CLOEXEC, dir_fd=path)
    else:
        top = os.open(path, _READ_DIR | os.O_NOFOLLOW | os.O_CLOEXEC)
    pending = [b"."]
    try:
        while pending:
            where = pending.pop()
            try:
                size, below = _size_in(top, where)
            except OSError:
                if strict:
                    raise
                continue
            total += size
            pending += (where + b"/" + name for name in below)
    finally:
        os.close(top)
    return total


def _size_in(top: int, where: bytes) -> tuple[int, list[bytes]]:
    """Return the bytes of the entries of one directory, and the directories among them."""
    total, below = 0, []
    fd = open_beneath(top, where, flags=_READ_DIR)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                found = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                total += found.st_blocks * 512
                if stat.S_ISDIR(found.st_mode):
                    below.append(os.fsencode(entry.name))
    finally:
        os.close(fd)
    return total, below


class _Copy:
    def __init__(self, owner: tuple[int, int] | None) -> None:
        self._owner = owner

    def directory(self, source: int, target: int, *, depth: int) -> None:
        for name, found in _entries(source, depth):
            self.entry(source, target, name, found, depth=depth)
        _finish_dir(target, os.fstat(source), self._owner_of(os.fstat(source)))

    def entry(
        self, source: int, target: int, name: str, found: os.stat_result, *, depth: int
    ) -> None:
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            with _opened(source, name, _READ_DIR) as below:
                made = open_beneath(target, os.fsencode(name), flags=_READ_DIR)
                try:
                    self.directory(below, made, depth=depth + 1)
                finally:
                    os.close(made)
        elif stat.S_ISLNK(found.st_mode):
            self.link(source, target, name, found, made=name)
        elif stat.S_ISREG(found.st_mode):
            self.file(source, target, name, made=name)

    def link(
        self, source: int, target: int, name: str, found: os.stat_result, *, made: str
    ) -> None:
        os.symlink(os.readlink(name, dir_fd=source), made, dir_fd=target)
        if (owner := self._owner_of(found)) is not None:
            os.chown(made, *owner, dir_fd=target, follow_symlinks=False)
        times = (found.st_atime_ns, found.st_mtime_ns)
        os.utime(made, ns=times, dir_fd=target, follow_symlinks=False)

    def file(self, source: int, target: int, name: str, *, made: str) -> None:
        with _opened(source, name, _READ_FILE) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return
            new = os.open(made, _NEW_FILE, 0o600, dir_fd=target)
            try:
                _copy_bytes(fd, new)
                if (owner := self._owner_of(found)) is not None:
                    os.fchown(new, *owner)
                os.fchmod(new, stat.S_IMODE(found.st_mode))
                os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
            finally:
                os.close(new)

    def _owner_of(self, found: os.stat_result) -> tuple[int, int] | None:
        if os.geteuid() != 0:
            return None
        return self._owner or (found.st_uid, found.st_gid)


class _Restore(_Copy):
    def __init__(self, owner: tuple[int, int] | None, kept: frozenset[tuple[int, int]]) -> None:
        super().__init__(owner)
        self._kept = kept

    def directory(self, source: int, target: int, *, depth: int) -> None:
        wanted = dict(_entries(source, depth))
        present = dict(_entries(target, depth))
        for name, found in present.items():
            if name not in wanted and (found.st_dev, found.st_ino) not in self._kept:
                _remove(target, name, found)
        for name, found in wanted.items():
            now = present.get(name)
            if now is None:
                self.entry(source, target, name, found, depth=depth)
            elif stat.S_ISDIR(found.st_mode) and stat.S_ISDIR(now.st_mode):
                with _opened(source, name, _READ_DIR) as below, _accessible(target, name) as at:
                    self.directory(below, at, depth=depth + 1)
            elif (now.st_dev, now.st_ino) in self._kept:
                continue
            elif not _is_equal(source, target, name, found, now):
                if stat.S_ISDIR(now.st_mode) or not _is_copied(found):
                    _remove(target, name, now)
                self.entry(source, target, name, found, depth=depth)
        _finish_dir(target, os.fstat(source), self._owner_of(os.fstat(source)))

    def link(
        self, source: int, target: int, name: str, found: os.stat_result, *, made: str
    ) -> None:
        with _replacing(target, made) as new:
            super().link(source, target, name, found, made=new)

    def file(self, source: int, target: int, name: str, *, made: str) -> None:
        try:
            with _replacing(target, made) as new:
                super().file(source, target, name, made=new)
        except OSError as exc:
            if exc.errno not in NO_SPACE:
                raise
            # There is no room for both: only one of them is wanted.
            try:
                os.unlink(made, dir_fd=target)
            except FileNotFoundError:
                raise exc from None
            super().file(source, target, name, made=made)


def _is_copied(found: os.stat_result) -> bool:
    """Return whether an entry that is no directory is part of a copy."""
    return stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)


@contextlib.contextmanager
def _replacing(parent: int, name: str) -> Iterator[str]:
    """Yield another name, which replaces ``name`` in one step once it is complete.

    So a process that ends meanwhile leaves the old entry or the new one.
    """
    made = f".put-{secrets.token_hex(12)}"
    try:
        yield made
        os.rename(made, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made, dir_fd=parent)
        raise


def _entries(fd: int, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    if depth > _MAX_DEPTH:
        raise SandboxFileError(
            f"directories are nested more than {_MAX_DEPTH} deep",
            number=errno.ELOOP,
            code="tree-too-deep",
            hint="remove them, or use a private work dir with backend='userns' or 'bubblewrap', "
            "whose checkpoints copy nothing",
        )
    with os.scandir(fd) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)


@contextlib.contextmanager
def _opened(parent: int, name: str, flags: int) -> Iterator[int]:
    with translate_os_errors(shown_path(name)):
        try:
            fd = open_beneath(parent, os.fsencode(name), flags=flags)
        except PermissionError:
            # Its owner, which this process is, has closed it to itself. The copy needs it open.
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            pinned = open_beneath(parent, os.fsencode(name), flags=os.O_PATH)
            try:
                os.chmod(f"/proc/self/fd/{pinned}", stat.S_IMODE(mode) | stat.S_IRWXU)
                fd = open_beneath(parent, os.fsencode(name), flags=flags)
                os.chmod(f"/proc/self/fd/{pinned}", stat.S_IMODE(mode))
            finally:
                os.close(pinned)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _accessible(parent: int, name: str) -> Iterator[int]:
    """Open a directory whose entries are changed; the copy's mode is set afterwards."""
    with _opened(parent, name, _READ_DIR) as fd:
        os.fchmod(fd, stat.S_IRWXU)
        yield fd


def _finish_dir(fd: int, found: os.stat_result, owner: tuple[int, int] | None) -> None:
    if owner is not None:
        os.fchown(fd, *owner)
    os.fchmod(fd, stat.S_IMODE(found.st_mode))
    os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_bytes(source: int, target: int) -> None:
    """Copy a file; file systems that can share the blocks do so."""
    try:
        while os.copy_file_range(source, target, _CHUNK):
            pass
    except OSError as exc:
        if exc.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
        os.lseek(source, 0, os.SEEK_SET)
        os.lseek(target, 0, os.SEEK_SET)
        while chunk := os.read(source, 1 << 20):
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]


def _is_equal(
    source: int, target: int, name: str, wanted: os.stat_result, now: os.stat_result
) -> bool:
    if wanted.st_mode != now.st_mode or wanted.st_size != now.st_size or now.st_nlink > 1:
        return False
    if stat.S_ISLNK(wanted.st_mode):
        return os.readlink(name, dir_fd=source) == os.readlink(name, dir_fd=target)
    if not stat.S_ISREG(wanted.st_mode):
        return False
    with _opened(source, name, _READ_FILE) as one, _opened(target, name, _READ_FILE) as other:
        while chunk := os.read(one, 1 << 20):
            if os.read(other, 1 << 20) != chunk:
                return False
    return wanted.st_mtime_ns == now.st_mtime_ns


def _remove(parent: int, name: str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        remove_entry(parent, os.fsencode(name), shown=name)
    else:
        os.unlink(name, dir_fd=parent)
