"""A blocked sandbox may get a network namespace that an earlier one of its session had.

Only one in which nothing was left and nothing was tried. So each attack leaves something behind,
and searches for it later; an untouched namespace is the positive control.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
from typing import Any, Final

import pytest
from tests.conftest import ISOLATED, descendants, eventually, held_by_launcher, session_of

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher

pytestmark = pytest.mark.spec("F1")

_RUNS: Final = 12
"""More than a session has namespaces at a time: each of them comes to be used."""
_NS_GET_USERNS: Final = 0xB701
_WHICH: Final = "import os; print(os.readlink('/proc/self/ns/net'))\n"
_PORT: Final = 8765
_MOST_KEPT: Final = 64
_UNUSED: Final = 64
"""Commands after which a waiting Python is let go."""

_STATE: Final = """
names = "snmp snmp6 netstat dev tcp tcp6 udp udp6 unix igmp igmp6 rt6_stats ipv6_route"
for name in names.split():
    try:
        print(open("/proc/net/" + name).read())
    except FileNotFoundError:
        print("no", name)
"""

LEFT_BEHIND = {
    # Closed by the side that had listened: its address is taken for a minute.
    "a connection that is over": f"""
import socket
server = socket.create_server(("127.0.0.1", {_PORT}))
client = socket.create_connection(("127.0.0.1", {_PORT}))
peer, _ = server.accept()
peer.close(); client.recv(1); client.close(); server.close()
""",
    "a datagram": f"""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.sendto(b"x", ("127.0.0.1", {_PORT}))
""",
    "a datagram over IPv6": f"""
import socket
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
    s.sendto(b"x", ("::1", {_PORT}))
""",
    "a direction over IPv6": """
import socket
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
    s.connect(("::1", 9))
""",
    "an attempt to leave": """
import socket
with socket.socket() as s:
    assert s.connect_ex(("192.0.2.1", 80)) != 0
""",
    "an attempt to leave over IPv6": """
import socket
with socket.socket(socket.AF_INET6) as s:
    assert s.connect_ex(("2001:db8::1", 80)) != 0
""",
}


async def _which(sbx: sb.Session, program: str = "") -> str:
    result = await sbx.exec(_WHICH + program, script_type="python", check=True)
    await asyncio.sleep(0.02)  # the next one is made when the last is over
    return result.stdout.strip()


async def _state(sbx: sb.Session, program: str = "") -> str:
    """Return the visible state of a namespace, after running the program in it."""
    result = await sbx.exec(program + _STATE, script_type="python", check=True)
    await asyncio.sleep(0.02)
    return result.stdout


async def test_an_untouched_namespace_is_reused(jail: sb.Session) -> None:
    kept = []
    for _ in range(2 * _RUNS):
        await _which(jail)
        kept.append(_which_are_kept())
    # Numbers of those that are gone come again, so it is not enough to see one twice.
    made = sum(not now <= before for before, now in itertools.pairwise(kept[-_RUNS:]))
    assert made <= _RUNS // 3, kept


@pytest.mark.parametrize("what", LEFT_BEHIND)
async def test_of_what_was_done_nothing_is_found_later(jail: sb.Session, what: str) -> None:
    if "IPv6" in what and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this kernel has no IPv6 (boot without ipv6.disable=1)")
    new = await _state(jail)
    for _ in range(3):
        assert await _state(jail, LEFT_BEHIND[what]) != new, "the change is visible in the state"
    for _ in range(_RUNS):
        assert await _state(jail) == new


async def test_an_address_that_an_earlier_command_used_is_free(jail: sb.Session) -> None:
    bind = f"import socket; socket.socket().bind(('127.0.0.1', {_PORT}))"
    for _ in range(_RUNS):
        await _which(jail, LEFT_BEHIND["a connection that is over"])
        await _which(jail, bind)


async def test_a_socket_in_flight_without_receiver_is_not_found_later(jail: sb.Session) -> None:
    """In a message between two sockets that hold each other: no process has it any more."""
    program = f"""
import array, socket
left, right = socket.socketpair()
held = [left, right, socket.create_server(("127.0.0.1", {_PORT}))]
fds = array.array("i", [s.fileno() for s in held])
left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
right.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
"""
    for _ in range(_RUNS):
        await _which(jail, program)


async def test_what_the_kernel_still_has_to_send_is_not_found_later(jail: sb.Session) -> None:
    """The kernel announces leaving a multicast group after the process has ended."""
    join = """
import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
group = socket.inet_aton("239.1.2.3") + socket.inet_aton("127.0.0.1")
s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
"""
    new = await _state(jail)
    for _ in range(_RUNS // 2):
        await _state(jail, join)
        assert await _state(jail, "import time; time.sleep(0.1)") == new


async def test_a_file_of_proc_net_shows_nothing_of_later_runs(jail: sb.Session) -> None:
    """One that was opened in a run that is over, and handed to a run that goes on."""
    watcher = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind("door")
door.listen()
print("up", flush=True)
peer, _ = door.accept()
_, (shown,), _, _ = socket.recv_fds(peer, 100, 1)
peer.close()
for line in sys.stdin:
    print("name-of" in os.pread(shown, 100_000, 0).decode(), flush=True)
"""
    giver = """
import os, socket, time
door = socket.socket(socket.AF_UNIX)
door.connect("door")
name = socket.socket(socket.AF_UNIX)
name.bind("\\0name-of-the-giver")
socket.send_fds(door, [b"x"], [os.open("/proc/net/unix", os.O_RDONLY)])
time.sleep(0.5)
"""
    later = """
import socket, time
name = socket.socket(socket.AF_UNIX)
name.bind("\\0name-of-a-later-one")
time.sleep(0.2)
"""
    watching = await jail.run(watcher, script_type="python", stdin=sb.PIPE, stdout=True)
    lines = watching.iter_stdout_lines()
    assert await anext(lines) == "up"

    async def sees() -> str:
        assert watching.stdin is not None
        watching.stdin.write(b"look\n")
        return await anext(lines)

    giving = asyncio.create_task(jail.exec(giver, script_type="python", check=True))
    assert await sees() == "True", "the positive control: while its giver is there"
    await giving
    for _ in range(_RUNS):
        running = asyncio.create_task(jail.exec(later, script_type="python", check=True))
        await asyncio.sleep(0.15)
        assert await sees() == "False"
        await running
    watching.kill()
    await watching.wait()


async def test_an_abstract_name_is_not_found_later(jail: sb.Session) -> None:
    for _ in range(_RUNS):
        await _which(jail, "import socket; socket.socket(socket.AF_UNIX).bind('\\0name')")


async def test_two_at_once_never_have_the_same(jail: sb.Session) -> None:
    for _ in range(4):
        slow = "import time; time.sleep(0.3)"
        seen = await asyncio.gather(*(_which(jail, slow) for _ in range(5)))
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("backend", ISOLATED)
async def test_two_sessions_never_have_the_same(backend: str) -> None:
    """At the same time; the number of one that is gone may come again anywhere."""
    slow = "import time; time.sleep(0.1)"
    async with session_of(backend) as one, session_of(backend) as other:
        for _ in range(_RUNS):
            ours, theirs = await asyncio.gather(_which(one, slow), _which(other, slow))
            assert ours != theirs


async def test_its_owner_is_not_the_sandbox(jail: sb.Session) -> None:
    """Rights over it come with another user namespace than the one that sandboxed code is in."""
    proc = await jail.run("echo ready; sleep 30", stdout=True)
    assert await anext(aiter(proc.iter_stdout_lines())) == "ready"
    found: list[int] = []

    def look() -> bool:
        found[:] = [pid for pid in descendants(Launcher.current().pid) if _name(pid) == "sleep"]
        return bool(found)

    assert eventually(look)
    with (
        open(f"/proc/{found[0]}/ns/net", "rb") as net,
        open(f"/proc/{found[0]}/ns/user", "rb") as own,
    ):
        owner = fcntl.ioctl(net, _NS_GET_USERNS)
        try:
            assert os.fstat(owner).st_ino != os.fstat(own.fileno()).st_ino
        finally:
            os.close(owner)
    proc.kill()
    await proc.wait()


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _kept() -> int:
    return held_by_launcher()["net"]


@pytest.mark.parametrize("backend", ISOLATED)
async def test_nothing_is_kept_for_a_session_that_has_no_sandbox(backend: str) -> None:
    assert _kept() == 0
    async with session_of(backend, warm=False) as sbx:
        for _ in range(3):
            await _which(sbx)
        assert eventually(lambda: _kept() == 0)
    async with session_of(backend) as sbx:
        for _ in range(3):
            await _which(sbx)
        assert _kept() > 0, "the positive control: while it has some, they are"
    assert _kept() == 0


@pytest.mark.parametrize("backend", ISOLATED)
async def test_not_many_are_kept_after_a_crowd(backend: str) -> None:
    async with session_of(backend) as sbx:
        await asyncio.gather(*(_which(sbx) for _ in range(2 * _MOST_KEPT)))
        await _which(sbx)
        # Unused ones, and those of the sandboxes that are there.
        here = Launcher.current().pid
        assert eventually(lambda: _kept() <= _MOST_KEPT + len(descendants(here)))
        assert len(descendants(here)) < _MOST_KEPT


def _which_are_kept() -> set[str]:
    here = f"/proc/{Launcher.current().pid}/fd"
    found = set()
    for fd in os.listdir(here):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"{here}/{fd}"))
    return {name for name in found if name.startswith("net:")}


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("waits", ["python", "shell"])
async def test_unused_spares_do_not_prevent_reuse(backend: str, waits: str) -> None:
    """While it waits nothing is used again: it may have got a file of any of them."""
    other = "shell" if waits == "python" else "python"
    texts = {"shell": "true", "python": "pass"}
    async with session_of(backend) as sbx:
        transport: Any = sbx._transport
        spares = {
            "shell": transport.pool.sandboxes._spares,
            "python": transport.pool.pythons._waiting,
        }[waits]
        for _ in range(2):
            await sbx.exec(texts[waits], script_type=waits)
            await asyncio.sleep(0.02)
        for _ in range(_UNUSED - 1):
            assert any(spares.values()), "the positive control"
            await sbx.exec(texts[other], script_type=other)
            await asyncio.sleep(0.02)
        await sbx.exec(texts[other], script_type=other)
        await asyncio.sleep(0.05)
        assert not any(spares.values())
