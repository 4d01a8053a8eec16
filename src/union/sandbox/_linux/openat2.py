"""Opening a path below a directory descriptor, in a tree someone hostile is changing right now.

Rules of this file:

- No component of the path is ever followed if it is a link, the last one included.
- The walk never goes above the descriptor it started from; ``..`` is refused before any call.
- Nothing here waits: callers that open for reading pass ``O_NONBLOCK``.
- Failures are plain ``OSError``: ``ELOOP`` for a link, ``EXDEV`` for a way out (or, with
  ``same_mount``, a mount point), ``EAGAIN`` when the tree would not hold still.

openat2 does the whole walk in the kernel. Where it is missing (before Linux 5.6, filtered, or on
another system), a walk by single components gives the same guarantees, one descriptor at a time.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import stat
from typing import Final

from union.sandbox._system import IS_LINUX, IS_MACOS

__all__ = ["PIN", "PIN_DIR", "has_openat2", "open_beneath", "rename_noreplace"]

_SYS_OPENAT2: Final = 437  # one number on every architecture
_SYS_RENAMEAT2: Final = {"x86_64": 316, "aarch64": 276}
_RENAME_NOREPLACE: Final = 1

_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_CONFINED: Final = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS

# The kernel gives EAGAIN when a rename anywhere raced the walk; a file under a lease gives it too,
# and that one lasts, so the number of tries has an end.
_TRIES: Final = 64

_AT_FDCWD: Final = -100

_O_SEARCH: Final = 0x40000000
"""Of macOS: a directory that may be searched, whether or not it may be read."""
PIN: Final[int] = getattr(os, "O_PATH", _O_SEARCH if IS_MACOS else os.O_RDONLY)
"""Holds a directory in place, with as few rights as the system lets a program request."""
PIN_DIR: Final = PIN | os.O_DIRECTORY | os.O_CLOEXEC
_STEP: Final = PIN_DIR | os.O_NOFOLLOW


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def open_beneath(
    dir_fd: int, path: bytes, *, flags: int, mode: int = 0, same_mount: bool = False
) -> int:
    """Open ``path`` below ``dir_fd`` and return the descriptor, which is close-on-exec.

    With ``same_mount``, a mount point in the path is refused as well.

    Preconditions: ``path`` is relative and not empty; ``b"."`` is ``dir_fd`` itself.
    """
    if path.startswith(b"/") or b".." in path.split(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    # O_NOFOLLOW with O_PATH would hand out the link itself instead of refusing it.
    flags = (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW
    if has_openat2():
        resolve = _CONFINED | (_RESOLVE_NO_XDEV if same_mount else 0)
        return _openat2(dir_fd, path, flags=flags, mode=mode, resolve=resolve)
    return _walk(dir_fd, path, flags=flags, mode=mode, same_mount=same_mount)


@functools.cache
def has_openat2() -> bool:
    """Say whether this kernel has openat2 and lets this process call it."""
    if not IS_LINUX:
        return False  # the number is that of another call
    try:
        fd = _openat2(_AT_FDCWD, b"/", flags=PIN | os.O_CLOEXEC, mode=0, resolve=0)
    except OSError as exc:
        # Some seccomp profiles answer an unknown call with EPERM; "/" itself never does.
        if exc.errno in {errno.ENOSYS, errno.EPERM}:
            return False
        raise
    os.close(fd)
    return True


def _openat2(dir_fd: int, path: bytes, *, flags: int, mode: int, resolve: int) -> int:
    how = _OpenHow(flags=flags, mode=mode, resolve=resolve)
    number = errno.EAGAIN
    for _ in range(_TRIES):
        fd: int = _libc().syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in {errno.EAGAIN, errno.EINTR}:
            break
    raise OSError(number, os.strerror(number), path)


def _walk(dir_fd: int, path: bytes, *, flags: int, mode: int, same_mount: bool) -> int:
    *parents, last = [name for name in path.split(b"/") if name not in {b"", b"."}] or [b"."]
    device = os.fstat(dir_fd).st_dev
    at = dir_fd
    try:
        for name in parents:
            below = _step(at, name, flags=_STEP)
            if at != dir_fd:
                os.close(at)
            at = below
            _same_device(at, device=device, wanted=same_mount, path=path)
        fd = _step(at, last, flags=flags | os.O_NOFOLLOW, mode=mode)
    finally:
        if at != dir_fd:
            os.close(at)
    try:
        _same_device(fd, device=device, wanted=same_mount, path=path)
        if stat.S_ISLNK(os.fstat(fd).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _step(dir_fd: int, name: bytes, *, flags: int, mode: int = 0) -> int:
    """Open one component, never through a link."""
    try:
        if IS_LINUX and flags & os.O_DIRECTORY and not flags & os.O_PATH:
            # Pinned first: gVisor follows a link to a directory in spite of O_NOFOLLOW, unless it
            # is opened with O_PATH.
            pinned = os.open(name, _STEP, dir_fd=dir_fd)
            try:
                return os.open(b".", flags, mode, dir_fd=pinned)
            finally:
                os.close(pinned)
        return os.open(name, flags, mode, dir_fd=dir_fd)
    except NotADirectoryError:
        # With O_DIRECTORY a link is only "not a directory"; openat2 tells the two apart.
        if stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _same_device(fd: int, *, device: int, wanted: bool, path: bytes) -> None:
    # A bind mount of the same file system passes here; removal, the one user of this check,
    # has the kernel's EBUSY from rmdir before it ever descends.
    if wanted and os.fstat(fd).st_dev != device:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)


def rename_noreplace(dir_fd: int, source: bytes, target: bytes) -> None:
    """Rename within one directory, atomically failing with ``FileExistsError`` if taken."""
    call = _SYS_RENAMEAT2.get(platform.machine()) if IS_LINUX else None
    if call is not None:
        done: int = _libc().syscall(
            ctypes.c_long(call),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(source),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(target),
            ctypes.c_uint(_RENAME_NOREPLACE),
        )
        if done == 0:
            return
        number = ctypes.get_errno()
        # EINVAL: this file system cannot. EPERM: a filter that does not know the call.
        if number not in {errno.ENOSYS, errno.EINVAL, errno.EPERM}:
            raise OSError(number, os.strerror(number), target)
    os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    os.unlink(source, dir_fd=dir_fd)
