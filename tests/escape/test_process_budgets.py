"""Attacks on the number of processes by many runs that each keep within their own limit."""

from __future__ import annotations

import asyncio
import itertools
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb
from union.sandbox._linux import inherited

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("G3")
_FORK = """
import os, sys, time
count = 0
try:
    while count < 60:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count, flush=True)
time.sleep(60)
"""


async def _taken(
    session: sb.Session, runs: int, *, modes: tuple[sb.NetworkMode, ...] = ("blocked",)
) -> list[int]:
    """How many processes each of several runs at a time could make."""
    procs = [
        await session.run(
            _FORK, script_type="python", background=True, stdout=sb.PIPE, network_mode=mode
        )
        for mode in itertools.islice(itertools.cycle(modes), runs)
    ]
    try:
        async with asyncio.timeout(30):
            return [int(await anext(aiter(proc.iter_stdout_lines()))) for proc in procs]
    finally:
        for proc in procs:
            proc.kill()
            await proc.wait()


@pytest.mark.threat(150)
async def test_runs_of_a_session_share_a_limit(jailed: OpenSession) -> None:
    """Each may have 40 and there are three: together they stay below the session's 80."""
    limits = sb.Resources(processes=40, session_processes=80)
    async with jailed(resources=limits, warm=0) as session:
        if dict(session.isolation.limits)["session_processes"] != "rlimit":
            pytest.skip("root's own id has no limit on processes: grant SYS_ADMIN to the container")
        taken = await _taken(session, 3)
        assert max(taken) <= 40
        assert 40 < sum(taken) <= 80, taken
        assert (await session.exec("echo fine")).stdout == "fine\n", "as soon as they are gone"
    async with jailed(resources=sb.Resources(processes=40), warm=0) as session:
        assert sum(await _taken(session, 3)) > 80, "without the limit they have more"


@pytest.mark.threat(150)
async def test_runs_with_different_networks_share_that_limit(jailed: OpenSession) -> None:
    limits = sb.Resources(processes=40, session_processes=80)
    async with jailed(resources=limits, warm=0) as session:
        if dict(session.isolation.limits)["session_processes"] != "rlimit":
            pytest.skip("root's own id has no limit on processes: grant SYS_ADMIN to the container")
        taken = await _taken(session, 4, modes=("blocked", "open"))
        assert max(taken) <= 40
        assert 40 < sum(taken) <= 80, taken


@pytest.mark.threat(150)
async def test_one_session_leaves_processes_to_another(jailed: OpenSession) -> None:
    limits = sb.Resources(processes=40, session_processes=41)
    async with jailed(resources=limits, warm=0) as one, jailed(resources=limits) as other:
        proc = await one.run(_FORK, script_type="python", background=True, stdout=sb.PIPE)
        async with asyncio.timeout(30):
            assert int(await anext(aiter(proc.iter_stdout_lines()))) > 30
        assert (await other.exec("echo fine")).stdout == "fine\n"
        proc.kill()
        await proc.wait()


@pytest.mark.threat(150)
def test_the_budget_of_all_sessions_is_clear_of_what_the_machine_has() -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert 0 < inherited.process_budget() <= most * 3 // 4
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert soft == resource.RLIM_INFINITY or inherited.process_budget() < soft


@pytest.mark.threat(150)
async def test_the_launcher_holds_every_session_to_the_budget(jailed: OpenSession) -> None:
    """The limit that the kernel copies into each user namespace made below the launcher."""
    from union.sandbox._linux.launcher import Launcher

    async with jailed() as session:
        assert (await session.exec("echo fine")).stdout == "fine\n"
        found = resource.prlimit(Launcher.current().pid, resource.RLIMIT_NPROC)
    assert found == (inherited.process_budget(),) * 2
