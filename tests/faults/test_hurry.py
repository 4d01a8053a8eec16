"""Callers in a hurry: signals by the thousand, closing while commands begin, waiting in vain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.conftest import WAYS, descendants, descriptors, eventually, marked, session_of

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher

MANY = 2000
"""More than a socket holds."""


@pytest.mark.spec("D8")
@pytest.mark.parametrize("way", marked(*WAYS))
async def test_a_kill_behind_a_thousand_signals_arrives(way: str) -> None:
    async with session_of(way) as session:
        proc = await session.run("sleep 60", background=True)
        for _ in range(MANY):
            proc.send_signal(signal.SIGCONT)
        proc.kill()
        async with asyncio.timeout(40):
            assert await proc.wait() == 137
        assert proc.termination_reason == "signal"


def _parents_of(name: str) -> list[int]:
    """Processes below the launcher that have a child of this name."""
    found = []
    for pid in descendants(Launcher.current().pid):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if f"({name})" in stat:
                found.append(int(stat.rpartition(")")[2].split()[1]))
    return found


@pytest.mark.spec("D8")
async def test_a_time_limit_holds_where_process_1_takes_no_signals() -> None:
    async with session_of("userns", warm=False) as session:
        proc = await session.run("exec sleep 60", background=True, timeout_s=0.5)
        assert eventually(lambda: bool(_parents_of("sleep")))
        os.kill(_parents_of("sleep")[0], signal.SIGSTOP)
        for _ in range(MANY):
            proc.send_signal(signal.SIGCONT)
        async with asyncio.timeout(40):
            assert await proc.wait() == 137
        assert proc.termination_reason == "timeout"


@pytest.mark.spec("D8")
async def test_a_kill_arrives_where_process_1_may_have_no_descriptor() -> None:
    program = """
import resource, time
resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
print(1, flush=True)
time.sleep(60)
"""
    async with session_of("userns") as session:
        proc = await session.run(program, script_type="python", stdout=True)
        assert await anext(aiter(proc.iter_stdout_lines())) == "1"
        proc.kill()
        async with asyncio.timeout(40):
            assert await proc.wait() == 137


@pytest.mark.spec("B2")
async def test_closing_while_commands_begin_leaves_no_descriptor() -> None:
    async with session_of("userns") as session:
        await session.exec("true")
    before = descriptors()
    for _ in range(5):
        session = await session_of("userns", warm=False).open()
        begun = [asyncio.create_task(session.run("sleep 60", background=True)) for _ in range(3)]
        await asyncio.sleep(0)
        await session.close()
        for found in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(found, BaseException):
                assert isinstance(found, sb.SandboxError), found
            else:
                assert found.returncode in {None, 137}
    assert descriptors() == before


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async with session_of("userns") as session:
        proc = await session.run("sleep 60", background=True)
        for _ in range(50):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(proc.wait(), 0.001)
        assert proc._sink.exit_waiters == []
        proc.kill()
        assert await proc.wait() == 137
