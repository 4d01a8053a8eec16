"""Makes a Python on Linux look like one on macOS to this package: for tests of the portable engine.

Loaded by the interpreter itself (this directory is on PYTHONPATH), before asyncio is imported, so
that the event loop uses poll. The calls that only Linux has are removed from the standard library.
Two calls that only macOS has are added, on top of /proc. Any use of ``openat2`` by number would
need ``ctypes``, which refuses to load the C library for this package.
"""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import select
import selectors
import signal
import socket
import sys
from typing import Any

_TAKEN = {
    os: (
        "O_PATH", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open",
        "pipe2", "splice", "sched_setaffinity", "sched_getaffinity", "getxattr", "setxattr",
        "listxattr", "removexattr", "eventfd", "copy_file_range", "setns", "unshare", "getrandom",
        "sched_getscheduler", "sched_setscheduler", "posix_fallocate", "posix_fadvise",
    ),
    select: ("epoll",),
    socket: (
        "SOCK_SEQPACKET", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "AF_VSOCK", "SO_PEERCRED",
        "MSG_CMSG_CLOEXEC", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT", "SO_MARK",
    ),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_WRITE"),
    signal: ("pidfd_send_signal",),
}  # fmt: skip
_F_GETPATH = 50
_LAUNCHER = os.environ.get("SANDBOX_TEST_PORTABLE_LAUNCHER", "")
_SANDBOX_EXEC = os.environ.get("SANDBOX_TEST_SANDBOX_EXEC", "")
_real_fcntl, _real_chmod, _real_readlink = fcntl.fcntl, os.chmod, os.readlink


def _fcntl(fd: Any, command: int, argument: Any = 0) -> Any:
    if command == _F_GETPATH:
        return os.fsencode(_real_readlink(f"/proc/self/fd/{int(fd)}")).ljust(len(argument), b"\0")
    return _real_fcntl(fd, command, argument)


_O_PATH, _O_NOFOLLOW = os.O_PATH, os.O_NOFOLLOW


def _chmod(path: Any, mode: int, *, dir_fd: Any = None, follow_symlinks: bool = True) -> None:
    if follow_symlinks:
        _real_chmod(path, mode, dir_fd=dir_fd)
        return
    fd = os.open(path, _O_PATH | _O_NOFOLLOW, dir_fd=dir_fd)
    try:
        _real_chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


class _Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes two modules of the package after they are loaded, and refuses a third."""

    def __init__(self) -> None:
        self._spec: importlib.machinery.ModuleSpec | None = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _PATCHES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return None
        loader = found.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _PATCHES[name](module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _patch_system(module: Any) -> None:
    module.IS_LINUX, module.IS_MACOS, module.NAME = False, True, "macOS"


def _patch_launcher(module: Any) -> None:
    module.BINARY = module.Path(_LAUNCHER)


def _patch_seatbelt(module: Any) -> None:
    module.PROGRAM = _SANDBOX_EXEC


_PATCHES = {
    "union.sandbox._system": _patch_system,
    "union.sandbox._macos.launcher": _patch_launcher,
    "union.sandbox._plan.seatbelt": _patch_seatbelt,
}

if _LAUNCHER:
    fcntl.fcntl = _fcntl
    os.chmod = _chmod
    os.supports_follow_symlinks.add(_chmod)
    os.supports_dir_fd.add(_chmod)
    for _module, _names in _TAKEN.items():
        for _name in _names:
            if hasattr(_module, _name):
                delattr(_module, _name)
            if _name in getattr(_module, "__all__", ()):
                _module.__all__.remove(_name)
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc,assignment]
    sys.meta_path.insert(0, _Patched())
