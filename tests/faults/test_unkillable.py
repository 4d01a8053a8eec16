"""Processes that cannot be killed: their session reports it, the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from scripts.soaking.state import left_by
from tests.conftest import (
    ISOLATED,
    SOON_S,
    descendants,
    eventually,
    held_by_launcher,
    session_of,
)

from union import sandbox as sb
from union.sandbox._linux import channel as channels
from union.sandbox._linux.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing another user's process needs root"),
]

# A traced process stops at its exit, also when it is killed, until its tracer lets it go on: the
# same as one that waits for a device, and nothing else of the machine has to be broken for it.
TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, TRACE_EXIT = 0x4206, 0x40
for pid in map(int, sys.argv[1:]):
    assert libc.ptrace(SEIZE, pid, None, TRACE_EXIT) == 0, ctypes.get_errno()
print("traced", flush=True)
sys.stdin.read()
"""


@contextmanager
def unkillable(*pids: int) -> Iterator[None]:
    argv = [sys.executable, "-c", TRACER, *map(str, pids)]
    tracer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tracer.stdin is not None
    assert tracer.stdout is not None
    try:
        assert tracer.stdout.readline() == "traced\n"
        yield
    finally:
        tracer.stdin.close()
        tracer.wait(20)
        tracer.stdout.close()
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def asleep(launcher: int, seconds: str) -> list[int]:
    """Find the processes below a launcher that run ``sleep`` for so many seconds."""
    found = []
    for pid in descendants(launcher):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read() == f"sleep\0{seconds}\0".encode():
                    found.append(pid)
        except OSError:
            continue
    return found


async def sleeper(session: sb.Session, **options: object) -> tuple[sb.SandboxProcess, int]:
    """Start a command that sleeps; return it and its number on the host."""
    seconds = str(10**6 + time.monotonic_ns() % 10**9)
    proc = await session.run(f"exec sleep {seconds}", background=True, **options)  # type: ignore[arg-type]
    launcher = Launcher.current().pid
    assert await asyncio.to_thread(eventually, lambda: bool(asleep(launcher, seconds)), within_s=20)
    (pid,) = asleep(launcher, seconds)
    return proc, pid


def test_the_stand_in_cannot_be_killed() -> None:
    process = subprocess.Popen(["sleep", "600"])
    with unkillable_then_reaped(process):
        for _ in range(3):
            os.kill(process.pid, signal.SIGKILL)
            assert eventually(lambda: state(process.pid) == "t")
        assert process.poll() is None
    assert process.wait(20) == -signal.SIGKILL


@contextmanager
def unkillable_then_reaped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    argv = [sys.executable, "-c", TRACER, str(process.pid)]
    tracer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tracer.stdin is not None
    assert tracer.stdout is not None
    assert tracer.stdout.readline() == "traced\n"
    try:
        yield
    finally:
        tracer.stdin.close()
        tracer.wait(20)
        tracer.stdout.close()


@pytest.mark.threat(146)
@pytest.mark.parametrize("limits", [{}, {"resources": sb.Resources(memory="256Mi")}], ids=["", "m"])
@pytest.mark.parametrize("backend", [*ISOLATED, pytest.param("none", marks=pytest.mark.bare)])
@pytest.mark.filterwarnings("ignore:backend='none':UserWarning")
async def test_it_delays_its_own_session_and_no_other(
    backend: str, limits: dict[str, sb.Resources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_DRAIN_S", 2.0)
    stuck = await session_of(backend, **limits).open()
    async with session_of(backend) as other:
        launcher = Launcher.current().pid
        bystander = await other.run("cat", background=True, stdin=sb.PIPE, stdout=sb.PIPE)
        proc, pid = await sleeper(stuck)
        with unkillable(pid):
            closing = asyncio.create_task(stuck.close())
            served = 0
            async with asyncio.timeout(60):
                while not closing.done():
                    assert (await other.exec("echo works")).stdout == "works\n"
                    async with session_of(backend) as third:
                        assert await third.run_code("print(1)") == "1\n"
                    served += 1
            assert served >= 2, "the control: there was time for it"
            assert state(pid) == "t", "the control: it has not ended"
            with pytest.raises(sb.SandboxExecutionError, match="still there") as caught:
                await closing
            assert caught.value.code == "close-incomplete"
            assert caught.value.hint
            assert proc.returncode == 137
            assert Launcher.current().pid == launcher, "it is not replaced"
            assert bystander.stdin is not None
            bystander.stdin.write(b"still here\n")
            bystander.stdin.close()
            assert (await bystander.communicate())[0] == b"still here\n"
            async with session_of(backend) as third:  # also while it is still there
                assert (await third.exec("echo works")).stdout == "works\n"
    async with asyncio.timeout(SOON_S):
        while left_by(os.getpid()):  # the session tries again until the process has ended
            await asyncio.sleep(0.05)


@pytest.mark.threat(146)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_timeout_returns_although_the_command_cannot_be_killed(backend: str) -> None:
    async with session_of(backend) as session:
        proc, pid = await sleeper(session, timeout_s=1)
        with unkillable(pid):
            async with asyncio.timeout(40):
                await proc.wait()
                out, _ = await proc.communicate()
            assert (proc.termination_reason, proc.returncode, out) == ("timeout", 137, b"")
            assert state(pid) == "t", "the control: it holds its pipes"
            assert (await session.exec("echo works")).stdout == "works\n"


@pytest.mark.threat(146)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_sessions_that_close_together_are_drained_side_by_side(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_DRAIN_S", 2.0)
    sessions = [await session_of(backend).open() for _ in range(6)]
    pids = [(await sleeper(session))[1] for session in sessions]
    with unkillable(*pids[:2]):
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)
        codes = [getattr(end, "code", end) for end in ends]
        assert codes == ["close-incomplete"] * 2 + [None] * 4
    assert eventually(lambda: not held_by_launcher()["socket"] > 2 + len(sessions))


STUCK_HOST = """
import asyncio, os, sys
from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
async def main():
    session = await sb.on_device.session(backend=sys.argv[1]).open()
    await session.run("exec sleep 654321", background=True)
    print(Launcher.current().pid, flush=True)
    sys.stdin.readline()
    os._exit(0)
asyncio.run(main())
"""


@pytest.mark.threat(146)
@pytest.mark.parametrize("backend", ISOLATED)
def test_the_launcher_ends_with_its_host_although_a_process_does_not(backend: str) -> None:
    argv = [sys.executable, "-c", STUCK_HOST, backend]
    host = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdin is not None
    assert host.stdout is not None
    launcher = int(host.stdout.readline())

    assert eventually(lambda: bool(asleep(launcher, "654321")), within_s=20)
    with unkillable(*asleep(launcher, "654321")):
        host.stdin.close()
        host.wait(20)
        host.stdout.close()
        assert eventually(lambda: not os.path.exists(f"/proc/{launcher}"), within_s=20)
