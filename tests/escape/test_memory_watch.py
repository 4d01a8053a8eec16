"""Attacks on the memory limit where no control group enforces it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb
from union.sandbox._linux import cgroup
from union.sandbox.on_device import _sandboxes

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("G3")
MIB = 1 << 20
LIMIT = sb.Resources(memory="48Mi")
_HOLD_S = 4.0
"""Long enough for the watch to look on a busy machine."""
_HELD = "\ntime.sleep(HOLD_S)\nprint('held', flush=True)\n"
_WAYS = {
    "private": "b = bytearray(SIZE)\nfor i in range(0, SIZE, 4096): b[i] = 1",
    "shared": "import mmap\nm = mmap.mmap(-1, SIZE)\nfor i in range(0, SIZE, 4096): m[i] = 1",
    "shared with a child": """
import mmap
m = mmap.mmap(-1, SIZE)
if os.fork() == 0:
    for i in range(0, SIZE, 4096): m[i] = 1
    time.sleep(30); os._exit(0)
""",
    "a file in memory": """
fd = os.memfd_create("x")
for _ in range(SIZE >> 20): os.write(fd, bytes(1 << 20))
""",
    "a segment that no process maps": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
number = libc.shmget(0, SIZE, 0o1600)
if number < 0: raise OSError(ctypes.get_errno(), "shmget")
at = libc.shmat(number, None, 0); ctypes.memset(at, 1, SIZE); libc.shmdt(ctypes.c_void_p(at))
""",
    "a process whose first thread has ended": """
import ctypes, threading
def hold():
    time.sleep(0.2)
    b = bytearray(SIZE)
    for i in range(0, SIZE, 4096): b[i] = 1
    time.sleep(HOLD_S); os.write(1, b"held\\n"); os._exit(0)
if os.fork() == 0:
    threading.Thread(target=hold).start()
    ctypes.CDLL(None).pthread_exit(None)
os.wait()
raise SystemExit
""",
    "files in both scratch mounts": """
for place in ("/tmp/x", "/dev/shm/x"):
    with open(place, "wb") as file:
        for _ in range(32): file.write(bytes(1 << 20))
""",
}


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host where no control group can be made."""
    monkeypatch.setattr(cgroup, "hierarchy", lambda: None)
    assert _sandboxes.cgroup is cgroup


def _program(name: str, hold_s: float = _HOLD_S) -> str:
    return f"import os, time\nSIZE, HOLD_S = 160 << 20, {hold_s}\n{_WAYS[name]}{_HELD}"


@pytest.mark.usefixtures("no_groups")
@pytest.mark.threat(144)
@pytest.mark.parametrize("name", list(_WAYS))
async def test_the_watch_counts_all_memory(jailed: OpenSession, name: str) -> None:
    """Killed, or refused by the filter; without a limit the same program holds all of it."""
    async with jailed(resources=LIMIT) as session:
        assert dict(session.isolation.limits)["memory"] == "watch"
        proc = await session.run(_program(name), script_type="python", timeout_s=60)
        out, _ = await proc.communicate()
    assert b"held" not in out
    if name in {"a file in memory", "a segment that no process maps"}:
        assert proc.returncode == 1
    else:
        assert proc.termination_reason == "oom"
        assert proc.usage.peak_memory_bytes > 48 * MIB
    async with jailed() as session:
        proc = await session.run(_program(name, hold_s=0), script_type="python", timeout_s=60)
        out, error = await proc.communicate()
    assert b"held" in out, error


@pytest.mark.usefixtures("no_groups")
@pytest.mark.threat(144)
async def test_memory_that_processes_share_counts_once(jailed: OpenSession) -> None:
    """Not a way around the limit, but the other side of it: honest programs are not killed."""
    code = """
import mmap, os, time
size = 24 << 20
b = bytearray(size); m = mmap.mmap(-1, size // 2)
for i in range(0, size, 4096): b[i] = 1
for i in range(0, size // 2, 4096): m[i] = 1
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        sum(m[i] for i in range(0, size // 2, 4096)); time.sleep(1); os._exit(0)
    children.append(pid)
print({os.waitpid(pid, 0)[1] for pid in children})
"""
    async with jailed(resources=sb.Resources(memory="96Mi")) as session:
        assert await session.run_code(code) == "{0}\n"


@pytest.mark.usefixtures("no_groups")
@pytest.mark.threat(144)
async def test_a_waiting_python_is_watched(jailed: OpenSession) -> None:
    """It runs what an earlier run left in the venv, before it has a command."""
    plant = r"""
import glob, os
site = glob.glob(os.environ["VIRTUAL_ENV"] + "/lib/python*/site-packages")[0]
open(site + "/A.pth", "w").write("import plant_module\n")
open(site + "/plant_module.py", "w").write('''
import os, time
try: os.fstat(100)
except OSError: pass
else:
    open("started", "w").close()
    b = bytearray(160 << 20)
    for i in range(0, len(b), 4096): b[i] = 1
    time.sleep(4)
    open("held", "w").close()
    time.sleep(60)
''')
"""
    async with jailed(resources=LIMIT) as session:
        await session.run_code(plant)
        assert await session.run_code("print('hi')") == "hi\n"
        async with asyncio.timeout(40):
            while not await session.exists("started"):
                await asyncio.sleep(0.02)
        pythons = session._transport.pool.pythons  # type: ignore[union-attr]
        waiting = next(one for kept in pythons._waiting.values() for one in kept)
        async with asyncio.timeout(40):
            while not waiting.run.sandbox.was_out_of_memory():
                await asyncio.sleep(0.02)
        assert not await session.exists("held")
        assert (await session.exec("echo fine")).stdout == "fine\n"


@pytest.mark.threat(144)
async def test_buffers_of_sockets_are_limited(jailed: OpenSession) -> None:
    """Version 1 of control groups counts them by themselves, and only if it is asked to."""
    where = cgroup.hierarchy()
    if where is None:
        pytest.skip("no control group can be made here: delegate one")
    code = """
import socket
wanted, got, kept = 200 << 20, 0, []
listener = socket.create_server(("127.0.0.1", 0), backlog=500)
while got < wanted and len(kept) < 900:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    client.settimeout(5)
    client.connect(listener.getsockname())
    kept += [client, listener.accept()[0]]
    client.setblocking(False)
    try:
        while True: got += client.send(bytes(1 << 18))
    except BlockingIOError: pass
print(got >> 20)
"""
    async with jailed() as session:
        assert int(await session.run_code(code)) >= 200, "without a limit"
    async with jailed(resources=sb.Resources(memory="64Mi")) as session:
        proc = await session.run(code, script_type="python", timeout_s=60)
        out, _ = await proc.communicate()
    assert proc.termination_reason in {"oom", "timeout"} or int(out or b"0") < 80
