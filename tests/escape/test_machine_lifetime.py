"""A machine against its own processes: they cannot outlive what ends them, nor harm its first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import (
    ISOLATED,
    LAUNCHER,
    SOON_S,
    children_of,
    is_machine,
    sandbox_processes,
    session_of,
)

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.spec("R1")]


@pytest.fixture(params=ISOLATED)
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    async with session_of(request.param, persist="machine") as session:
        yield session


ESCAPES = """
import ctypes, os, signal, sys, time
for n in range(1, 32):
    try:
        signal.signal(n, signal.SIG_IGN)
    except OSError:
        pass
def daemon(how):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    how()
    os.closerange(0, 3)
    time.sleep(600)
    os._exit(0)
daemon(lambda: None)
daemon(lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0))   # not dumpable
daemon(lambda: ctypes.CDLL(None).prctl(36, 1, 0, 0, 0))  # a reaper of its own
daemon(lambda: os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None)
daemon(lambda: os.execv("/tmp/unreadable", ["x", "600"]))
time.sleep(600)
"""


@pytest.mark.threat(177)
async def test_no_process_leaves_the_tree_that_a_timeout_ends(machine: sb.Session) -> None:
    """Sessions, double forks, other reapers, hidden memory, programs that cannot be read."""
    other = int((await machine.exec("sleep 600 & echo $!")).stdout)
    await machine.exec(
        "cp $(readlink -f $(which sleep)) /tmp/unreadable; chmod 111 /tmp/unreadable"
    )
    task = asyncio.create_task(machine.exec(ESCAPES, script_type="python", timeout_s=600))
    end = time.monotonic() + SOON_S
    while len(await machine.processes()) < 7:
        assert time.monotonic() < end, "the control: five of them run beside their command"
        await asyncio.sleep(0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    end = time.monotonic() + SOON_S
    while [info.pid for info in await machine.processes()] != [other]:
        assert time.monotonic() < end, await machine.processes()
        await asyncio.sleep(0.05)


@pytest.mark.threat(177, 180)
async def test_a_fork_bomb_ends_with_its_command() -> None:
    """Its processes fork while they are killed; the limit is that of the session."""
    resources = sb.Resources(processes=64)
    async with session_of("userns", persist="machine", resources=resources) as session:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        result = await session.exec(bomb, script_type="python", timeout_s=1)
        assert result.termination_reason == "timeout"
        assert await session.processes() == ()
        assert (await session.exec("echo usable", timeout_s=SOON_S)).stdout == "usable\n"


FIRST = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
for n in range(1, 65):
    try:
        os.kill(1, n)
    except OSError:
        pass
try:
    signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGKILL)
except OSError:
    pass
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC,
             resource.RLIMIT_SIGPENDING, resource.RLIMIT_DATA):
    try:
        resource.prlimit(1, kind, (0, 0))
    except OSError:
        pass
for path in ("/proc/1/mem", "/proc/1/oom_score_adj", "/proc/1/fd/3"):
    try:
        os.open(path, os.O_RDWR)
    except OSError:
        continue
    print(path, "is open")
try:
    os.sched_setaffinity(1, {0})
    os.setpriority(os.PRIO_PROCESS, 1, 19)
except OSError:
    pass
print("tried")
"""


@pytest.mark.threat(178)
async def test_the_first_process_stays_in_charge(machine: sb.Session) -> None:
    """Whatever is sent to it, and whatever limit is set on it, it still ends a tree."""
    assert await machine.run_code(FIRST) == "tried\n"
    result = await machine.exec("setsid sleep 600 & sleep 600", timeout_s=0.5)
    assert result.termination_reason == "timeout"
    assert await machine.processes() == ()
    assert (await machine.exec("echo usable")).stdout == "usable\n"


@pytest.mark.threat(178)
async def test_runners_are_out_of_reach(machine: sb.Session) -> None:
    """The process that reports the end of a command is not in the pid namespace at all."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; cat $p/comm; done; echo $PPID"
    result = await machine.exec(script)
    assert result.stdout.splitlines()[-1] == "0", "its parent has no number inside"
    await machine.exec("kill -KILL -1; kill -STOP -1; true")
    assert (await machine.exec("echo usable", timeout_s=SOON_S)).stdout == "usable\n"


@pytest.mark.threat(180)
async def test_endless_output_of_a_left_process_is_slowed_down(machine: sb.Session) -> None:
    """The host reads a little of it from time to time, and stays usable."""
    assert (await machine.exec("yes & yes >&2 & true", timeout_s=SOON_S)).ok
    for _ in range(3):
        assert (await machine.exec("echo usable", timeout_s=SOON_S)).stdout == "usable\n"
    assert len(await machine.processes()) == 2


@pytest.mark.threat(180)
async def test_the_limit_on_processes_holds_over_all_commands() -> None:
    """What earlier commands left behind counts."""
    resources = sb.Resources(processes=20, session_processes=40)
    async with session_of("userns", persist="machine", warm=0, resources=resources) as session:
        refused = 0
        for _ in range(8):
            try:
                # Not by bash, which tries for 15 seconds to make a process.
                result = await session.exec(["dash", "-c", f"{'sleep 600 & ' * 9} :"])
            except sb.SandboxExecutionError as exc:  # not even its first process
                refused += "Resource temporarily unavailable" in str(exc)
            else:
                refused += "fork" in result.stderr
        assert refused
        left = await session.processes()
        assert 9 <= len(left) <= 40
        for info in left:
            assert await session.stop_process(info.pid)
        assert (await session.exec("echo usable")).stdout == "usable\n"


@pytest.mark.threat(180)
async def test_nothing_outlives_its_session() -> None:
    async with session_of("userns", persist="machine") as session:
        await session.exec("for i in 1 2 3; do setsid sleep 600 & done; (setsid sleep 600 &)")
        assert len(await session.processes()) == 4
        assert sandbox_processes()
        launcher = LAUNCHER.current().pid
        assert any(map(is_machine, children_of(launcher))), "the control"
    assert not sandbox_processes()
    assert not any(map(is_machine, children_of(launcher)))
