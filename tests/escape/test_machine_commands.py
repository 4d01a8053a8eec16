"""Commands of one machine against each other: one has a network, the other has none.

They have one id, one pid namespace and one /tmp. What keeps them apart is the user namespace of
each, the Landlock domain of each, and the system-call filter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, session_of

from union import sandbox as sb
from union.sandbox._linux import kernel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.spec("R1")]

VICTIM = """
import ctypes, os, socket, sys
secret = ctypes.create_string_buffer(b"untouched")
path, abstract, tcp = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()
abstract.bind("\\0victim")
abstract.listen()
tcp.bind(("127.0.0.1", 0))
tcp.listen()
print(os.getpid(), ctypes.addressof(secret), tcp.fileno(), tcp.getsockname()[1], flush=True)
sys.stdin.readline()
print(secret.value.decode())
"""

ATTACK = """
import ctypes, errno, json, os, socket, sys
pid, address, fd, port = map(int, sys.argv[1:5])
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def call(name, number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    found[name] = "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
    return result

def attempt(name, work):
    try:
        work()
    except OSError as exc:
        found[name] = errno.errorcode[exc.errno]
    else:
        found[name] = "done"

class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

buffer = ctypes.create_string_buffer(b"hijacked!")
here, there = Vec(ctypes.addressof(buffer), 9), Vec(address, 9)
both = ctypes.byref(here), 1, ctypes.byref(there), 1, 0
x86 = os.uname().machine == "x86_64"
call("ptrace", 101 if x86 else 117, 16, pid, 0, 0)
call("process_vm_readv", 310 if x86 else 270, pid, *both)
call("process_vm_writev", 311 if x86 else 271, pid, *both)
pidfd = os.pidfd_open(pid)
call("pidfd_getfd", 438, pidfd, fd, 0)
call("setns by pidfd", 308 if x86 else 268, pidfd, 0x40000000)
call("kcmp", 312 if x86 else 272, os.getpid(), pid, 0, 0, 0)

def peek():
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        if memory.read(9) != b"untouched":
            raise OSError(errno.EIO, "")

attempt("mem", peek)
attempt("mem for writing", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
for name in ("environ", "auxv", "maps", "stack", "syscall", "personality", "io"):
    attempt(name, lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
for name in ("cwd", "root", "exe", "ns/net", "ns/user", f"fd/{fd}"):
    attempt(name, lambda: os.readlink(f"/proc/{pid}/{name}"))
attempt("fd", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("map_files", lambda: os.listdir(f"/proc/{pid}/map_files"))
attempt("through root", lambda: os.listdir(f"/proc/{pid}/root/"))
attempt("net namespace", lambda: os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
attempt("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0victim"))
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", port), 5))
print(json.dumps(found))
"""

CONTROL = """
import subprocess, sys
pipe = subprocess.PIPE
victim = subprocess.Popen([sys.executable, "victim.py"], stdin=pipe, stdout=pipe, text=True)
sys.argv[1:] = victim.stdout.readline().split()
exec(open("attack.py").read())
print(victim.communicate("go on")[0], end="")
"""
"""The attacker is the parent of its victim: Yama lets no other process trace it."""

FILTERED = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp",
            "setns by pidfd")  # fmt: skip
PROC = ("mem", "environ", "cwd", "root", "exe", "ns/net", "ns/user", "map_files",
        "through root", "net namespace")  # fmt: skip
"""What the system-call filter does not refuse: here the namespaces and Landlock must."""


@pytest.fixture(params=ISOLATED)
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    async with session_of(request.param, persist="machine") as session:
        yield session


async def attack(machine: sb.Session, *arguments: str, **options: object) -> dict[str, str]:
    await machine.put_bytes("attack.py", ATTACK.encode())
    result = await machine.exec(["python", "attack.py", *arguments], check=True, **options)
    return json.loads(result.stdout)


@pytest.mark.threat(176)
@pytest.mark.parametrize("modes", [("open", "blocked"), ("blocked", "blocked")])
async def test_no_command_drives_another(machine: sb.Session, modes: tuple[str, str]) -> None:
    wide, narrow = modes
    victim = await machine.run(
        VICTIM, script_type="python", stdin=sb.PIPE, stdout=sb.PIPE, network_mode=wide
    )
    lines = victim.iter_stdout_lines()
    pid, *rest = (await anext(lines)).split()
    assert int(pid) == victim.pid, "one pid namespace: the attacker can name its victim"
    found = await attack(machine, pid, *rest, network_mode=narrow)
    found.pop("fd")  # which numbers are in use can be listed; no descriptor can be followed
    assert {name: end for name, end in found.items() if end == "done"} == {}
    assert {found[name] for name in PROC} <= {"EACCES", "EPERM"}
    assert victim.stdin is not None
    victim.stdin.write(b"\n")
    assert await anext(lines) == "untouched"
    assert await victim.wait() == 0


@pytest.mark.threat(176)
async def test_the_attacks_work_within_one_command(machine: sb.Session) -> None:
    """The control: without the namespaces between them, all but the filtered ones succeed."""
    await machine.put_bytes("victim.py", VICTIM.encode())
    await machine.put_bytes("attack.py", ATTACK.encode())
    output = await machine.run_code(CONTROL)
    report, state = output.splitlines()
    found = json.loads(report)
    assert {found[name] for name in FILTERED} == {"EPERM"}
    done = {name for name, end in found.items() if end == "done"}
    assert {*PROC, "loopback", "abstract socket"} - {"map_files"} <= done
    assert found["mem for writing"] == "EACCES", "Landlock makes /proc read-only for everybody"
    assert state == "untouched"


@pytest.mark.threat(176)
async def test_user_namespaces_alone_separate_commands(machine: sb.Session) -> None:
    """Each command has one of its own below the machine's, and no capability in any."""
    script = "readlink /proc/self/ns/user; cat /proc/self/uid_map; grep ^Cap /proc/self/status"
    first, second = [(await machine.exec(script)).stdout.splitlines() for _ in range(2)]
    assert first[0] != second[0]
    assert first[1:] == second[1:]
    assert {line.split()[1] for line in first[2:]} == {"0" * 16}
    assert kernel.landlock_abi() == machine.isolation.landlock_abi


@pytest.mark.threat(179)
async def test_a_left_process_shares_no_network_with_later_commands(machine: sb.Session) -> None:
    """Namespaces are reused only while no process has outlived its command."""
    server = (
        "import os, socket\n"
        "if os.fork() == 0:\n"
        "    s = socket.create_server(('127.0.0.1', 4711))\n"
        "    open('/tmp/up', 'w').write(os.readlink('/proc/self/ns/net'))\n"
        "    while True:\n"
        "        s.accept()[0].send(b'reached')\n"
    )
    await machine.run_code(server)
    wait = "while ! [ -s /tmp/up ]; do sleep 0.01; done; cat /tmp/up; echo; "
    seen = await machine.exec(wait + "for i in 1; do readlink /proc/self/ns/net; done")
    held, *_ = seen.stdout.split()
    dial = "import socket; socket.create_connection(('127.0.0.1', 4711), 5)"
    for _ in range(8):
        result = await machine.exec(["readlink", "/proc/self/ns/net"])
        assert result.stdout.strip() != held
    assert "ConnectionRefusedError" in (await machine.exec(dial, script_type="python")).stderr


@pytest.mark.threat(179)
async def test_an_untouched_namespace_is_still_not_reused(machine: sb.Session) -> None:
    """A process that was left behind holds it, though there is no trace in the namespace."""
    script = "readlink /proc/self/ns/net; sleep 600 &"
    held = (await machine.exec(script)).stdout.strip()
    later = [(await machine.exec("readlink /proc/self/ns/net")).stdout.strip() for _ in range(12)]
    assert held not in later
