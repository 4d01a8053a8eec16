"""Nothing grows: descriptors, processes, mounts, cgroups, threads and temp dirs stay level."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tests.conftest import descriptors, eventually, sandbox_processes, session_of

from union import sandbox as sb

RUNS = 1000
CYCLES = 200


def state() -> dict[str, object]:
    mounts = Path("/proc/self/mountinfo").read_text().count("\n")
    # Of this process: others on the machine may come and go while it is walked.
    own = f"sandbox-{os.getpid()}-"
    groups = sum(n.startswith(own) for _, names, _ in os.walk("/sys/fs/cgroup") for n in names)
    return {
        "descriptors": descriptors(),
        "threads": threading.active_count(),
        "mounts": mounts,
        "groups": groups,
        "processes": sandbox_processes(),
    }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.alone  # mounts are counted, which others may make
@pytest.mark.threat(113)
@pytest.mark.slow
@pytest.mark.spec("G4")
@pytest.mark.timeout(120)
async def test_a_thousand_runs_leave_nothing() -> None:
    async with session_of("userns") as sbx:
        for _ in range(20):
            await sbx.exec("true")
        await asyncio.sleep(0.1)  # the sandbox that waits for the next command is in place
        before, memory = state(), resident_mib()
        for _ in range(RUNS):
            assert (await sbx.exec("true")).ok
        await asyncio.sleep(0.1)
        assert eventually(lambda: state() == before), (before, state())
        assert resident_mib() - memory < 8


@pytest.mark.alone  # mounts are counted, which others may make
@pytest.mark.threat(113)
@pytest.mark.slow
@pytest.mark.spec("B2", "G4")
@pytest.mark.timeout(120)
async def test_two_hundred_sessions_leave_nothing() -> None:
    async def cycle() -> None:
        async with session_of("userns", resources=sb.Resources(memory="64Mi")) as sbx:
            await sbx.run("sleep 100 & setsid sleep 100 &", stdout=True)

    await cycle()
    before = state()
    for _ in range(CYCLES):
        await cycle()
    assert eventually(lambda: state() == before), (before, state())


@pytest.mark.threat(105)
@pytest.mark.slow
@pytest.mark.spec("D6")
@pytest.mark.timeout(120)
async def test_a_gibibyte_through_a_slow_reader_does_not_stay_in_memory(way: str) -> None:
    async with session_of(way) as sbx:
        proc = await sbx.run("head -c 1073741824 /dev/zero", stdout=True)
        before, most, total, chunks = resident_mib(), 0.0, 0, 0
        async for chunk in proc.iter_stdout():
            total += len(chunk)
            chunks += 1
            if chunks % 500 == 0:
                # A pause: meanwhile the writer must be stopped, not buffered.
                most = max(most, resident_mib() - before)
                await asyncio.sleep(0.02)
        assert total == 2**30
        assert most < 32


@pytest.mark.threat(105)
@pytest.mark.slow
@pytest.mark.spec("D6")
@pytest.mark.timeout(120)
async def test_a_large_output_through_communicate_is_cut_visibly_or_whole() -> None:
    async with session_of("userns") as sbx:
        proc = await sbx.run(f"head -c {2**28} /dev/zero", stdout=True)
        out, _ = await proc.communicate()
        assert (len(out), proc.truncated) == (64 * 2**20, ("stdout",))
        proc = await sbx.run(f"head -c {2**28} /dev/zero", stdout=True)
        out, _ = await proc.communicate(max_output_bytes=2**31)
        assert (len(out), proc.truncated) == (2**28, ())
