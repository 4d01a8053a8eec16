"""Attacks on the epoll watches of the caller, which the kernel counts for each user id."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of

from union import sandbox as sb
from union.sandbox._linux import epoll_watches
from union.sandbox.on_device import _counter_guard, _settings

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = [pytest.mark.spec("G2"), pytest.mark.threat(142)]

_BUDGET = 4000
_HEAD = """
import array, ctypes, os, select, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def take(files=40, instances=110):
    end = os.pipe()[0]
    fds = [os.dup(end) for _ in range(files)]
    for _ in range(instances):
        one = select.epoll()
        for fd in fds: one.register(fd, 0)
        kept.append(one)
"""
_WAYS = {
    "in one process": "take()",
    "in children": """
for _ in range(4):
    if os.fork() == 0:
        take(instances=30); os.write(1, b"."); time.sleep(60); os._exit(0)
""",
    "under numbers that are closed": """
end, one = os.pipe()[0], select.epoll()
files = [os.dup(os.pipe()[0]) for _ in range(20)]
for number in range(100, 330):
    for fd in files:
        os.dup2(fd, number); one.register(number, 0)
""",
    "in the table of a thread": """
def alone():
    assert libc.unshare(0x400) == 0  # CLONE_FILES
    take(); ready.set(); time.sleep(60)
ready = threading.Event()
threading.Thread(target=alone, daemon=True).start(); ready.wait()
""",
    "in a process that forbids inspection": "libc.prctl(4, 0, 0, 0, 0); take()",
}
_HIDDEN = """
near, far = socket.socketpair()
fds = [os.dup(near.fileno()) for _ in range(20)]
for _ in range(110):
    one = select.epoll()
    for fd in fds: one.register(fd, 0)
    near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno()]))])
    one.close()
"""
_HOLD = "\nprint('held', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small budget, in sessions that are watched also if the caller is root."""
    monkeypatch.setattr(epoll_watches, "max_watches", lambda: _BUDGET * 8)
    monkeypatch.setattr(_settings, "_epoll_limit", lambda _: "watch")
    monkeypatch.setattr(_counter_guard, "_EVERY_S", 0.05)


async def _run(session: sb.Session, body: str) -> sb.SandboxProcess:
    return await session.run(
        _HEAD + body + _HOLD, script_type="python", background=True, stdout=sb.PIPE
    )


@pytest.mark.parametrize("name", list(_WAYS))
async def test_a_session_cannot_hold_more_than_its_share(
    jailed: OpenSession, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The command ends, with the reason; one that holds less goes on."""
    caplog.set_level(logging.WARNING, "union.sandbox")
    async with jailed() as session:
        assert dict(session.isolation.limits)["epoll"] == "watch"
        honest = await _run(session, "take(instances=10)")
        greedy = await _run(session, _WAYS[name])
        async with asyncio.timeout(60):
            await greedy.wait()
        assert greedy.termination_reason == "limit"
        assert "epoll watches" in caplog.text
        assert honest.returncode is None
        assert (await session.exec("echo fine")).stdout == "fine\n"
        honest.kill()
        await honest.wait()


@pytest.mark.parametrize("name", list(_WAYS))
async def test_without_the_watch_all_are_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of the attack do what they claim: the watch counts what each of them holds."""
    monkeypatch.setattr(epoll_watches, "max_watches", lambda: 0)
    async with session_of("userns") as session:
        greedy = await _run(session, _WAYS[name])
        async with asyncio.timeout(60):
            assert "held" in await anext(aiter(greedy.iter_stdout_lines()))
        sandbox = next(iter(session._transport.runner.running())).sandbox
        tables = epoll_watches.descriptor_tables(await sandbox.channel.locate(sandbox.number))
        if name != "in children":  # they begin at the same time
            assert epoll_watches.count(tables, 1 << 40, seconds=60) > _BUDGET
        assert epoll_watches.bound(tables) > _BUDGET
        greedy.kill()
        await greedy.wait()


@pytest.mark.parametrize("is_exhausted", [True, False])
async def test_hidden_watches_end_when_no_watch_is_left(
    jailed: OpenSession, monkeypatch: pytest.MonkeyPatch, *, is_exhausted: bool
) -> None:
    """In messages they cannot be counted. Commands that hide nothing go on, in each session."""
    held: list[sb.SandboxProcess] = []
    monkeypatch.setattr(
        epoll_watches,
        "is_exhausted",
        lambda: is_exhausted and any(proc.returncode is None for proc in held),
    )
    async with jailed() as session, jailed() as other:
        honest = await _run(other, "take(instances=5)")
        greedy = await _run(session, _HIDDEN)
        async with asyncio.timeout(60):
            assert await anext(aiter(greedy.iter_stdout_lines())) == "held"
            held.append(greedy)
            if is_exhausted:
                await greedy.wait()
                assert greedy.termination_reason == "limit"
            else:
                await asyncio.wait([asyncio.ensure_future(greedy.wait())], timeout=1)
                assert greedy.returncode is None, "only a user without watches ends it"
        assert honest.returncode is None


async def test_the_last_watches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the kernel itself: a watch that is refused for lack of others."""
    assert not epoll_watches.is_exhausted()

    class Refused:
        def register(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(epoll_watches.select, "epoll", Refused)
    assert epoll_watches.is_exhausted()


_ENDED = """
import ctypes, os, sys
from union.sandbox._linux import epoll_watches
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which the change of ids has reset
counts = []
for is_alive in (False, True):
    begun, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end[1])
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        if is_alive:
            os.write(begun[1], b"x")
            os.read(end[0], 1)
        os._exit(0)
    if is_alive:
        os.read(begun[0], 1)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    counts.append(epoll_watches.count([epoll_watches.Table(pid, pid, 256)], 1 << 40))
    os.close(end[1])
    os.waitpid(pid, 0)
print(*counts)
"""


def test_a_process_that_ends_holds_nothing() -> None:
    """Its files are root's then, like those of a process that forbids inspection: the control."""
    program = [sys.executable, "-c", _ENDED]
    done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=40)
    ended, uninspectable = map(int, done.stdout.split())
    assert ended == 0
    assert uninspectable == 256**3 // 4


async def test_forked_processes_share_what_they_inherit(jailed: OpenSession) -> None:
    """The other side of counting: 40 workers with the 200 watches of their parent are honest."""
    body = """
take(instances=5)
for _ in range(40):
    if os.fork() == 0: time.sleep(60); os._exit(0)
"""
    async with jailed() as session:
        workers = await _run(session, body)
        async with asyncio.timeout(60):
            assert await anext(aiter(workers.iter_stdout_lines())) == "held"
        await asyncio.wait([asyncio.ensure_future(workers.wait())], timeout=1)
        assert workers.returncode is None


async def test_a_context_is_watched() -> None:
    async with session_of("userns") as session:
        async with session.context() as context:
            result = await context.run(_HEAD + "take()" + _HOLD)
        assert result.ended == "died"
        assert "limit" in result.reason
        assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_what_a_command_leaves_in_a_machine_is_watched() -> None:
    """The command has ended, and its process goes on until it takes too much."""
    left = _HEAD + "if os.fork(): os._exit(0)\nos.setsid()\n" + "take()" + _HOLD
    async with session_of("userns", persist="machine") as session:
        await session.exec(["sh", "-c", "sleep 60 & exit 0"])
        proc = await session.run(left, script_type="python", stdout=sb.DEVNULL)
        assert await proc.wait() == 0
        async with asyncio.timeout(60):
            while [p.command for p in await session.processes()] != [("sleep", "60")]:
                await asyncio.sleep(0.05)
