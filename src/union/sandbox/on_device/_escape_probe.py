"""Runs inside a sandbox, on behalf of ``doctor``: tries to get at what the host has laid out.

This file is handed to the sandbox's Python as a script, so it uses nothing of the package. What it
is to look for comes in one environment variable; what it found goes out as JSON. A try that comes
back with a text got through; an empty text, or an error of the system, means that it was held.
"""

import contextlib
import ctypes
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any

BAIT = "SANDBOX_DOCTOR_BAIT"
_NEW_USER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def see_process(bait: dict[str, Any]) -> str:
    """Looks for the calling process: its number alone could be another process of the sandbox."""
    with open(f"/proc/{bait['pid']}/stat", encoding="ascii", errors="replace") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return f"process {bait['pid']} is listed" if started == bait["started"] else ""


def change_kernel(_: dict[str, Any]) -> str:
    """Opens settings of the kernel for writing; nothing is written."""
    found = []
    for name in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger"):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/{name}", os.O_WRONLY))
            found.append(name)
    return ", ".join(found)


def reach_network(bait: dict[str, Any]) -> str:
    with socket.create_connection(("127.0.0.1", bait["port"]), 2):
        return "connected"


def reach_sockets(bait: dict[str, Any]) -> str:
    found = []
    for name in (bait["path_socket"], "\0" + bait["abstract_socket"]):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(name)
            found.append(repr(name))
    return ", ".join(found)


def read_secret(bait: dict[str, Any]) -> str:
    with open(bait["secret"], encoding="ascii") as file:
        return f"{len(file.read())} bytes were read"


def write_system(_: dict[str, Any]) -> str:
    found = []
    for directory in ("/", "/usr", "/etc"):
        path = os.path.join(directory, ".sandbox-doctor")
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
            found.append(directory)
    return ", ".join(found)


def make_namespace(_: dict[str, Any]) -> str:
    _check(_libc.unshare(_NEW_USER))
    return "unshare was allowed"


def mount(_: dict[str, Any]) -> str:
    """Asks for a file system that there is not: whoever may mount is told just that."""
    try:
        _check(_libc.mount(b"none", b"/", b"sandbox-doctor", 0, None))
    except OSError as exc:
        if exc.errno != errno.ENODEV:
            raise
    return "mount was allowed"


def change_root(_: dict[str, Any]) -> str:
    _check(_libc.chroot(b"/"))
    return "chroot was allowed"


def hold_capabilities(_: dict[str, Any]) -> str:
    found = []
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, value = line.split(":", 1)
            if name.startswith("Cap") and int(value, 16):
                found.append(f"{name} {value.strip()}")
            elif name == "NoNewPrivs" and value.strip() != "1":
                found.append("privileges can be gained by exec")
    return ", ".join(found)


def find_descriptors(_: dict[str, Any]) -> str:
    found = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.append(str(fd))
    return ", ".join(found)


TRIES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    # The last would change what follows, should it get through.
    "processes": ("see the calling process", see_process),
    "kernel": ("open kernel settings for writing", change_kernel),
    "network": ("connect to a listener on the host's loopback", reach_network),
    "sockets": ("connect to Unix sockets of the host", reach_sockets),
    "files": ("read a file of the caller", read_secret),
    "system": ("write into system directories", write_system),
    "capabilities": ("hold a capability, or gain one", hold_capabilities),
    "descriptors": ("find an inherited descriptor", find_descriptors),
    "mounts": ("mount a file system", mount),
    "root": ("change the root directory", change_root),
    "namespaces": ("make a user namespace", make_namespace),
}


def main() -> None:
    bait = json.loads(os.environ[BAIT])
    found = {}
    for name, (_, attempt) in TRIES.items():
        try:
            got = attempt(bait)
        except OSError as exc:
            found[name] = {"through": False, "detail": exc.strerror or str(exc)}
        else:
            found[name] = {"through": bool(got), "detail": got}
    print(json.dumps(found))  # noqa: T201 - how the answer leaves the sandbox


if __name__ == "__main__":
    main()
