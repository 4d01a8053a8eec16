"""No module uses a call of Linux at import: a Mac imports all of them, and says what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# The standard library and third parties are imported first: they look at sys.platform too.
PRELUDE = """\
import aiohttp, asyncio, asyncio.subprocess, concurrent.futures.process, cryptography.x509, json
import multiprocessing.connection, os, pkgutil, resource, select, socket, ssl, subprocess, sys
import urllib.request, fcntl, tempfile, ctypes
TAKEN = {
    os: ("O_PATH", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "pipe2",
         "getxattr", "sched_getscheduler", "SCHED_FIFO", "SCHED_RESET_ON_FORK", "splice"),
    select: ("epoll",),
    socket: ("SOCK_SEQPACKET", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "SO_PEERCRED",
             "MSG_CMSG_CLOEXEC"),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS"),
    resource: ("prlimit", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO"),
}
for module, names in TAKEN.items():
    for name in names:
        delattr(module, name)
real_fcntl = fcntl.fcntl
def with_getpath(fd, command, argument=0):
    if command == 50:  # F_GETPATH
        return os.fsencode(os.readlink(f"/proc/self/fd/{fd}")).ljust(len(argument), b"\\0")
    return real_fcntl(fd, command, argument)
fcntl.fcntl = with_getpath
sys.platform = "darwin"
"""

EVERYTHING = """
import union.sandbox
names = [m.name for m in pkgutil.walk_packages(union.sandbox.__path__, "union.sandbox.")]
frameworks = "union.sandbox.adapters."  # each needs its own, which is not installed
skipped = [
    n for n in names if ".cluster" in n or n.startswith(frameworks) or n.endswith("__main__")
]
for name in names:
    if name not in skipped:
        __import__(name)
print(json.dumps(sorted(set(names) - set(skipped))))
"""

REPORTS = """
from union import sandbox as sb
async def opened(**options):
    try:
        await sb.on_device.session(**options).open()
    except sb.SandboxError as error:
        return {"code": error.code, "message": str(error.args[0]), "hint": error.hint}
report = sb.doctor()
print(json.dumps({
    "doctor": report.to_dict(),
    "backends": {
        s.name: [s.available, s.reason, s.hint] for s in sb.on_device.available_backends()
    },
    "userns": asyncio.run(opened(backend="userns")),
    "remote": repr(sb.remote.session(endpoint="http://127.0.0.1:1", token="x")),
}))
"""


def on_a_mac(program: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", PRELUDE + program],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("G1")
def test_a_mac_imports_every_module() -> None:
    names = on_a_mac(EVERYTHING)
    assert len(names) > 180
    for package in ("remote", "server", "on_device", "testing", "_cli"):
        assert f"union.sandbox.{package}" in names


def test_the_check_notices_a_call_of_linux_at_import() -> None:
    """The positive control: the names are really gone, and a module that uses one fails."""
    with pytest.raises(AssertionError, match="O_PATH"):
        on_a_mac("FLAG = os.O_PATH | os.O_CLOEXEC")


@pytest.mark.spec("G1")
def test_a_mac_says_what_it_has() -> None:
    found = on_a_mac(REPORTS)
    assert found["doctor"]["default"] == "sandbox-exec"
    assert not found["doctor"]["ok"]
    layers = {layer["name"]: layer for layer in found["doctor"]["layers"]}
    assert layers["linux"]["detail"] == "this is macOS"
    assert not layers["launcher"]["available"]
    assert "--only-binary" in layers["launcher"]["hint"]
    assert not layers["sandbox-exec"]["available"]
    for name in ("bubblewrap", "userns"):
        available, reason, hint = found["backends"][name]
        assert not available
        assert "it needs Linux, and this is macOS" in reason
        assert "sandbox-exec" in hint
    available, reason, _ = found["backends"]["none"]
    assert not available
    assert "launcher" in reason
    assert found["userns"]["code"] == "backend-unavailable"
    assert "Session" in found["remote"]
