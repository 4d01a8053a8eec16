"""Kill -9 of the host or of the launcher at each step of a checkpoint, a rollback and a fork."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, eventually, session_of

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.owned_dir import sweep

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4
"""Moments at which a program is killed, spread over all it does."""

# Every call of the interpreter to the system is one step.
HOST = """
import asyncio, os, signal, sys
from union import sandbox as sb

limit, count = int(sys.argv[2]), 0

def step(event, _):
    global count
    count += armed
    if armed and count == limit:
        os.kill(os.getpid(), signal.SIGKILL)

armed = False
sys.addaudithook(step)

async def main():
    global armed
    session = await sb.on_device.session(backend=sys.argv[1]).open()
    print(os.getpid(), os.path.dirname(session._transport.host_dir), flush=True)
    await session.exec("mkdir d; echo 1 > d/a")
    armed = True
    first = await session.checkpoint()
    await session.put_bytes("b", b"2")
    second = await session.checkpoint()
    await session.rollback(first)
    other = await second.fork().open()
    await session.adopt(other)
    await second.drop()
    running = await session.run("sleep 60", background=True)
    await session.checkpoint()
    armed = False
    print(count, flush=True)
    await other.close()
    await session.close()

asyncio.run(main())
"""


def run_host(backend: str, limit: int) -> tuple[int, list[str]]:
    ran = subprocess.run(
        [sys.executable, "-c", HOST, backend, str(limit)],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode in {0, -signal.SIGKILL}, ran.stderr.decode()
    return ran.returncode, ran.stdout.decode().split()


@pytest.mark.spec("L1")
@pytest.mark.parametrize("backend", ISOLATED[-1:])
def test_a_host_that_is_killed_at_any_step_leaves_nothing(backend: str) -> None:
    code, (_, where, total) = run_host(backend, 0)
    assert code == 0
    assert int(total) > 20 * STEPS
    for number in range(1, STEPS + 1):
        code, (pid, *_) = run_host(backend, int(total) * number // (STEPS + 1))
        assert code == -signal.SIGKILL
        _check_nothing_left(pid, where)


def _check_nothing_left(pid: str, where: str) -> None:
    def is_removed() -> bool:
        # Another process may be removing them, or the killed one's sandboxes are still ending.
        sweep(where)
        return not any(name.startswith(f"sandbox-{pid}-") for name in os.listdir(where))

    assert eventually(is_removed), os.listdir(where)


@contextlib.contextmanager
def killed_at(limit: int) -> Any:
    """Kill the launcher when this process calls the system for the ``limit``-th time."""
    state = {"count": 0, "pid": Launcher.current().pid, "armed": True}
    _HOOKS.append(state)
    state["limit"] = limit
    try:
        yield state
    finally:
        _HOOKS.remove(state)


_HOOKS: list[dict[str, Any]] = []


def _step(_event: str, _arguments: object) -> None:
    for state in _HOOKS:
        state["count"] += 1
        if state["count"] == state["limit"] and state["armed"]:
            state["armed"] = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def hooked() -> None:
    sys.addaudithook(_step)  # for good: hooks cannot be removed


CALLS: dict[str, Callable[[sb.Session, sb.Checkpoint], Any]] = {
    "checkpoint": lambda session, _: session.checkpoint(),
    "rollback": lambda session, kept: session.rollback(kept),
    "fork": lambda _, kept: _opened_and_closed(kept),
}


async def _opened_and_closed(kept: sb.Checkpoint) -> None:
    async with kept.fork() as other:
        assert await other.get_bytes("a") == b"1"


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("hooked")
async def test_a_launcher_that_is_killed_at_any_step_loses_nothing(name: str) -> None:
    call = CALLS[name]
    async with session_of("userns") as session:
        await session.put_bytes("a", b"1")
        kept = await session.checkpoint("kept")
        with killed_at(0) as state:
            await call(session, kept)
        total = state["count"]
        assert total > STEPS
        killed = 0
        for number in range(STEPS):
            await session.put_bytes("b", b"2")
            with (
                killed_at(1 + total * number // STEPS) as state,
                contextlib.suppress(sb.SandboxError),
            ):
                await call(session, kept)
            killed += not state["armed"]  # a call may have fewer steps than the first one
            # The checkpoint is there, whole, for this session and for forks.
            await _returned(session, kept)
            assert await session.get_bytes("a") == b"1"
            assert [info.path for info in await session.list_dir(".")] == ["a"]
            assert (await session.exec("cat a; ls", check=True)).stdout == "1a\n"
            async with kept.fork() as other:
                assert (await other.exec("cat a", check=True)).stdout == "1"
        assert killed > STEPS // 2


async def _returned(session: sb.Session, kept: sb.Checkpoint) -> None:
    """Roll back; the first call may still meet the launcher that was killed."""
    try:
        await session.rollback(kept)
    except sb.SandboxExecutionError as error:
        assert "launcher" in str(error)  # noqa: PT017 - it may also succeed
        await session.rollback(kept)
