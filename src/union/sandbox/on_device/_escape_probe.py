"""Attack a sandbox from inside, for ``doctor``: try to reach targets that the host created.

The sandbox's Python runs this file as a script, so it imports nothing of the package. One
environment variable holds the targets as JSON; the results are printed as JSON. An attempt that
returns text has succeeded; an empty text or an ``OSError`` means that it was blocked.
"""

import contextlib
import ctypes
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any

TARGETS = "SANDBOX_DOCTOR_TARGETS"
_NEW_USER = 0x10000000
_CAPABILITY_VERSION = 0x20080522
_PR_GET_NO_NEW_PRIVS = 39
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_host_process(targets: dict[str, Any]) -> str:
    """Find the calling process; its pid alone could be another process of the sandbox."""
    with open(f"/proc/{targets['pid']}/stat", encoding="ascii", errors="replace") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return f"process {targets['pid']} is listed" if started == targets["started"] else ""


def open_kernel_settings(_: dict[str, Any]) -> str:
    """Open kernel settings for writing, without writing anything."""
    found = []
    for name in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger"):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/{name}", os.O_WRONLY))
            found.append(name)
    return ", ".join(found)


def connect_loopback(targets: dict[str, Any]) -> str:
    with socket.create_connection(("127.0.0.1", targets["port"]), 2):
        return "connected"


def connect_unix_sockets(targets: dict[str, Any]) -> str:
    found = []
    names = [targets["path_socket"]]
    if targets["abstract_socket"]:
        names.append("\0" + targets["abstract_socket"])
    for name in names:
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(name)
            found.append(repr(name))
    return ", ".join(found)


def read_secret(targets: dict[str, Any]) -> str:
    with open(targets["secret"], encoding="ascii") as file:
        return f"{len(file.read())} bytes were read"


def write_system_dirs(_: dict[str, Any]) -> str:
    found = []
    for directory in ("/", "/usr", "/etc"):
        path = os.path.join(directory, ".sandbox-doctor")
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
            found.append(directory)
    return ", ".join(found)


def create_user_namespace(_: dict[str, Any]) -> str:
    _check(_libc.unshare(_NEW_USER))
    return "unshare was allowed"


def mount_filesystem(_: dict[str, Any]) -> str:
    """Mount a file system type that does not exist: ENODEV shows that mounting is allowed."""
    try:
        _check(_libc.mount(b"none", b"/", b"sandbox-doctor", 0, None))
    except OSError as exc:
        if exc.errno != errno.ENODEV:
            raise
    return "mount was allowed"


def change_root(_: dict[str, Any]) -> str:
    _check(_libc.chroot(b"/"))
    return "chroot was allowed"


def list_capabilities(_: dict[str, Any]) -> str:
    found = []
    if not os.access("/proc/self/status", os.R_OK):
        return _capabilities_by_call()
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, value = line.split(":", 1)
            if name.startswith("Cap") and int(value, 16):
                found.append(f"{name} {value.strip()}")
            elif name == "NoNewPrivs" and value.strip() != "1":
                found.append("privileges can be gained by exec")
    return ", ".join(found)


def _capabilities_by_call() -> str:
    """Ask the kernel by system calls, where /proc is hidden."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, sets))
    found = [f"{value:x}" for value in sets if value]
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        found.append("privileges can be gained by exec")
    return ", ".join(found)


def signal_host_process(targets: dict[str, Any]) -> str:
    os.kill(targets["pid"], 0)
    return "a signal was allowed"


def find_inherited_fds(_: dict[str, Any]) -> str:
    found = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.append(str(fd))
    return ", ".join(found)


PORTABLE = ("network", "sockets", "files", "system", "descriptors", "signals")
"""Attempts on systems that are not Linux; ``signals`` is only there: a pid means nothing inside a
pid namespace."""
ATTEMPTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    # The last attempts change the process if they succeed, so they come after the others.
    "processes": ("see the calling process", find_host_process),
    "kernel": ("open kernel settings for writing", open_kernel_settings),
    "network": ("connect to a listener on the host's loopback", connect_loopback),
    "sockets": ("connect to Unix sockets of the host", connect_unix_sockets),
    "files": ("read a file of the caller", read_secret),
    "system": ("write into system directories", write_system_dirs),
    "capabilities": ("hold a capability, or gain one", list_capabilities),
    "descriptors": ("find an inherited descriptor", find_inherited_fds),
    "mounts": ("mount a file system", mount_filesystem),
    "root": ("change the root directory", change_root),
    "namespaces": ("make a user namespace", create_user_namespace),
    "signals": ("signal the calling process", signal_host_process),
}


def main() -> None:
    targets = json.loads(os.environ[TARGETS])
    found = {}
    for name in targets["attempts"]:
        attempt = ATTEMPTS[name][1]
        try:
            got = attempt(targets)
        except OSError as exc:
            found[name] = {"through": False, "detail": exc.strerror or str(exc)}
        else:
            found[name] = {"through": bool(got), "detail": got}
    print(json.dumps(found))  # noqa: T201 - the host reads the result from stdout


if __name__ == "__main__":
    main()
