"""Checkpoints while commands and contexts run: exact, or refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, REMOTE, session_of

from union import sandbox
from union.sandbox.errors import SandboxBusyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

WRITER = """
import os, mmap, sys, threading
names = ("a", "b", "c")
files = [open(name, "w+b") for name in names]
for file in files: file.write(b"%012d" % 0); file.flush()
mapped = mmap.mmap(files[2].fileno(), 12)
SETUP
print("ready", flush=True)
n = 0
while True:
    n += 1
    text = b"%012d" % n
    os.pwrite(files[0].fileno(), text, 0)
    os.pwrite(files[1].fileno(), text, 0)
    mapped[:] = text
"""
CONTINUED_BY_A_TIMER = """
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("rest", ctypes.c_char * 48)]
class Times(ctypes.Structure):
    _fields_ = [("every_s", ctypes.c_long), ("every_ns", ctypes.c_long),
                ("first_s", ctypes.c_long), ("first_ns", ctypes.c_long)]
event = Event(signo=signal.SIGCONT, notify=0)
timers = [ctypes.c_void_p() for _ in range(64)]
for timer in timers:
    assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
def arm(*_):
    # One after another: SIGSTOP discards a signal that is pending, with its timer.
    for k, timer in enumerate(timers, 1):
        times = Times(0, 0, 0, k * 3_000_000)
        assert libc.timer_settime(timer, 0, ctypes.byref(times), None) == 0
signal.signal(signal.SIGCONT, arm)  # an ignored signal of a timer is not sent
arm()
"""


@pytest.fixture(params=[*ISOLATED, REMOTE + "userns"])
async def live(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    async with session_of(request.param) as session:
        yield session


async def started(session: sb.Session, setup: str = "") -> sb.SandboxProcess:
    source = WRITER.replace("SETUP", setup)
    process = await session.run(source, script_type="python", stdout=True, background=True)
    assert await anext(process.iter_stdout_lines()) == "ready"
    return process


async def numbers(checkpoint: sb.Checkpoint) -> list[int]:
    async with checkpoint.fork() as other:
        return [int(await other.get_bytes(name)) for name in ("a", "b", "c")]


def is_a_moment(found: list[int]) -> bool:
    """Whether the writer was between two of its steps."""
    return sorted(found, reverse=True) == found and found[0] - found[2] <= 1


@pytest.mark.spec("L2", "L3")
@pytest.mark.threat(187)
async def test_open_and_mapped_files_are_those_of_one_moment(live: sb.Session) -> None:
    process = await started(live)
    for _ in range(3):
        found = await numbers(await live.checkpoint())
        assert is_a_moment(found), found
    while int(await live.get_bytes("a")) <= found[0]:  # it goes on
        await asyncio.sleep(0.01)
    assert process.returncode is None
    first = (await live.checkpoints())[0]
    await live.rollback(first)
    await process.wait()
    assert process.termination_reason == "closed"
    assert await live.diff(first) == ()


@pytest.mark.spec("L2", "L3")
@pytest.mark.threat(187)
@pytest.mark.parametrize("way", ISOLATED)
async def test_code_that_continues_itself_is_noticed(way: str) -> None:
    """A timer sends it SIGCONT; a copy during which it ran does not count."""
    async with session_of(way) as session:
        await session.run_code(
            """
            import os
            for n in range(300): open(f"f{n}", "wb").write(os.urandom(10_000))
            """
        )
        process = await started(session, CONTINUED_BY_A_TIMER)
        refused: list[SandboxBusyError] = []
        for _ in range(3):
            try:
                found = await numbers(await session.checkpoint())
            except SandboxBusyError as error:
                refused.append(error)
                break
            else:
                assert is_a_moment(found), found
        assert refused
        assert all("a" in error.files for error in refused)
        assert process.returncode is None
        process.kill()
        await process.wait()
        await session.checkpoint()


@pytest.mark.spec("L3")
async def test_contexts_keep_their_variables(live: sb.Session) -> None:
    async with live.context() as context, live.context("bash") as shell:
        await context.run("x = 41; f = open('log', 'w')", check=True)
        await shell.run("y=1; mkdir d; cd d", check=True)
        checkpoint = await live.checkpoint()
        cell = "x += 1; f.write('one'); f.flush(); open('new', 'w').close(); print(x)"
        assert (await context.run(cell, check=True)).stdout == "42\n"
        await shell.run("echo $y > y", check=True)
        assert [one.path for one in await live.diff(checkpoint)] == ["d/y", "log", "new"]
        await live.rollback(checkpoint)
        assert not context.alive
    async with live.context() as context:
        found = await context.run("import os; print(sorted(os.listdir()))", check=True)
        assert "'d', 'log']" in found.stdout


_VFORK = """
import ctypes, os, time
number, flags = {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x4000 | 17  # CLONE_VFORK
libc = ctypes.CDLL(None)
print("ready", flush=True)
while True:  # the parent waits for its child, and cannot be stopped meanwhile
    if (pid := libc.syscall(number, flags, 0, 0, 0, 0)) == 0:
        time.sleep(0.2)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.spec("L1")
async def test_a_process_that_waits_for_its_vfork_is_stopped(live: sb.Session) -> None:
    process = await live.run(_VFORK, script_type="python", stdout=True, background=True)
    assert await anext(aiter(process.iter_stdout_lines())) == "ready"
    for _ in range(3):
        await live.checkpoint()
    assert process.returncode is None
    process.kill()
    await process.wait()


@pytest.mark.spec("L3")
async def test_a_stopped_process_stays_stopped(live: sb.Session) -> None:
    """Processes that the code has stopped itself are not continued."""
    run = await live.run(
        "sh -c 'kill -STOP $$; echo woken > woken' & echo $!; sleep 60",
        stdout=True,
        background=True,
    )
    await anext(run.iter_stdout_lines())
    await asyncio.sleep(0.2)
    checkpoint = await live.checkpoint()
    await asyncio.sleep(0.2)
    assert await live.diff(checkpoint) == ()
    run.kill()
    await run.wait()


@pytest.mark.spec("L3")
async def test_contexts_return_with_the_files(live: sb.Session) -> None:
    async with live.context() as context:
        await context.run("x = [1]; open('a', 'w').write('1')", check=True)
        kept = await live.checkpoint(contexts=True)
        for _ in range(2):
            await context.run("x.append(2); open('a', 'w').write('2'); open('b', 'w')", check=True)
            running = await live.run("sleep 60", background=True)
            await live.rollback(kept)
            await running.wait()
            assert running.termination_reason == "closed"
            assert await live.diff(kept) == ()
            shown = await context.run("import os; print(x, open('a').read(), os.path.exists('b'))")
            assert (shown.stdout, context.alive) == ("[1] 1 False\n", True)
        # The context goes on in the same work dir as commands and file calls.
        await context.run("open('c', 'w').write('3')", check=True)
        assert (await live.exec("cat c", check=True)).stdout == "3"
        assert await live.get_bytes("c") == b"3"
        async with live.context("bash"):
            with pytest.raises(sandbox.SandboxUsageError, match="cannot be saved"):
                await live.checkpoint(contexts=True)
        await kept.drop()
        with pytest.raises(sandbox.SandboxUsageError):
            await live.rollback(kept)


@pytest.mark.spec("L3")
async def test_a_lost_context_changes_nothing() -> None:
    async with session_of("userns") as live:
        async with live.context():
            kept = await live.checkpoint(contexts=True)
        await live.put_bytes("a", b"1")
        with pytest.raises(sandbox.SandboxError):
            await live.rollback(kept)
        assert await live.get_bytes("a") == b"1"


@pytest.mark.spec("L2")
async def test_a_rollback_does_not_end_the_guards_of_a_session() -> None:
    async with session_of("userns") as live:
        await live.rollback(await live.checkpoint())
        guard = live._transport.runner._counters  # type: ignore[union-attr]
        assert not guard._is_closed
    assert guard._is_closed  # the control
