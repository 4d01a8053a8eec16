"""Inspect processes of sandboxes from the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import children_of, descendants

from union.sandbox._linux.launcher import Launcher

CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "cgroup", "net")


def status(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def numbers(pid: int | str) -> list[str]:
    """Return the pids of a process, one per pid namespace, ours first."""
    return status(pid)["NSpid"].split()


def namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def inside() -> set[int]:
    """Return every process of every sandbox of ours, spares included.

    A bwrap is not inside.
    """
    launcher = Launcher._current
    assert launcher is not None
    ours = len(numbers("self"))
    found = set()
    for pid in descendants(launcher.pid):
        with contextlib.suppress(OSError):  # it has just ended
            if len(numbers(pid)) > ours:
                found.add(pid)
    return found


def sandboxes() -> list[dict[str, int]]:
    """Return one mapping for each sandbox: pid inside -> pid here.

    Found by parent, because its own user may not inspect the namespaces of a first process.
    """
    found = []
    for pid in inside():
        with contextlib.suppress(OSError):  # it has just ended
            if numbers(pid)[-1] == "1":
                found.append({numbers(one)[-1]: one for one in (pid, *children_of(pid))})
    return found


def is_closed(pid: int) -> bool:
    """Return whether even its own user may not inspect its descriptors."""
    try:
        os.listdir(f"/proc/{pid}/fd")
        Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    return False


_READ_FILTER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
def ptrace(request, pid, address=0, data=None):
    ctypes.set_errno(0)
    got = libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(address), data)
    if got < 0:
        print("no", ctypes.get_errno())
        sys.exit()
    return got
for pid in map(int, sys.argv[1:]):
    ptrace(0x4206, pid)  # SEIZE
    ptrace(0x4207, pid)  # INTERRUPT
    os.waitpid(pid, 0x40000000)  # __WALL
    size = ptrace(0x420C, pid)  # SECCOMP_GET_FILTER, the one that was installed last
    code = ctypes.create_string_buffer(size * 8)
    ptrace(0x420C, pid, 0, code)
    print(code.raw.hex())
    ptrace(17, pid)  # DETACH
"""


def filters(pids: list[int]) -> list[bytes] | None:
    """Return the filter of each, as the kernel holds it; None if the kernel refuses."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _READ_FILTER, *map(str, pids)],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    lines = done.stdout.split("\n")[:-1]
    if any(line.startswith("no") for line in lines):
        return None
    return [bytes.fromhex(line) for line in lines]
