"""File descriptors in socket messages, and sealed files in memory."""

from __future__ import annotations

import array
import errno
import os
import socket
import tempfile
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import in_flight
from union.sandbox._linux.framed_socket import FramedSocket
from union.sandbox._system import IS_LINUX, IS_MACOS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "close_all",
    "message_pair",
    "path_of",
    "read_only_memfd",
    "receive",
    "sealed_memfd",
    "send_with_fds",
]

_FD_SIZE: Final = array.array("i").itemsize
# Plain integers: the flags of each message are tested on the path of a run.
_TRUNCATED, _CLOEXEC = int(socket.MSG_CTRUNC), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_F_GETPATH: Final = 50
"""Of macOS."""
_MAX_PATH_BYTES: Final = 1024
_ALL_SEALS: Final = 0xF
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE."""


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return our end of a connection that carries messages, and the end that is sent away."""
    if IS_LINUX:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return FramedSocket.pair()


def path_of(fd: int) -> str:
    """Return the path of an open file or directory, as the kernel knows it."""
    if not IS_MACOS:
        return os.readlink(f"/proc/self/fd/{fd}")
    import fcntl

    return os.fsdecode(fcntl.fcntl(fd, _F_GETPATH, bytes(_MAX_PATH_BYTES)).rstrip(b"\0"))


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one message with copies of ``fds``, which stay the caller's to close.

    If this user has too many descriptors in flight for the soft limit on open files, the message is
    sent under the hard limit.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    try:
        sock.sendmsg([data], rights)
    except OSError as exc:
        if not IS_LINUX or exc.errno != errno.ETOOMANYREFS:
            raise
        with in_flight.raised_limit():
            sock.sendmsg([data], rights)


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def receive(sock: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receive one message with all of its descriptors, which become the caller's.

    Args:
        sock: a SEQPACKET socket.
        size: largest size of the message, in bytes.
        max_fds: largest number of descriptors.

    Raises:
        OSError: EMFILE if not all descriptors could be received; then none is. The kernel drops
            those that exceed the process's limit and only sets a flag.

    """
    data, control, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(max_fds * _FD_SIZE), _CLOEXEC)
    fds = _descriptors(control) if control else []
    if flags & _TRUNCATED:
        close_all(fds)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, fds


def sealed_memfd(name: str, content: bytes, *, owner: int | None = None) -> int:
    """Return a descriptor of an immutable file in memory, owned by the id ``owner`` if given.

    Where there are no files in memory it is an unlinked file, opened for reading only.
    """
    if not IS_LINUX:
        return _unlinked_file(content)
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if owner is not None:
            os.fchown(fd, owner, owner)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only_memfd(name: str, content: bytes, *, owner: int | None) -> int:
    """Return a sealed file in memory, opened for reading only."""
    fd = sealed_memfd(name, content, owner=owner)
    if not IS_LINUX:
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _unlinked_file(content: bytes) -> int:
    fd, path = tempfile.mkstemp(prefix="sandbox-")
    try:
        reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    try:
        os.unlink(path)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(fd)
    return reading
