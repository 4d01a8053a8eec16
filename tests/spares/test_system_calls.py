"""How many system calls a run costs: pinned, so that what creeps in is seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="counts with strace (Debian: apt-get install strace)"
)

PROGRAM = """
import asyncio, os
from union import sandbox as sb
from union.sandbox.on_device import _workdir

# A thread that removes what other tests have left would be counted as well.
_workdir._swept.add(_workdir.default_parent())

async def main():
    async with sb.on_device.session(backend="userns") as sbx:
        async def once():
            proc = await sbx.run("true", stdout=True)
            await proc.communicate()
        for _ in range(3):
            await once()
            await asyncio.sleep(0.3)
        shown = [path for paths in sbx.fs_allowlist().values() for path in paths]
        print(sum(path.startswith("/tmp/") for path in shown))
        os.write(2, b"begin")
        await once()
        os.write(2, b"end")
        await asyncio.sleep(0.3)

asyncio.run(main())
"""
# What was counted when this was written, and a little for kernels and Pythons that differ.
HOST_MOST = 48
TO_EXEC_MOST = 14
MADE_MOST = 140


def _calls(trace: Path) -> list[tuple[int, str, str]]:
    """(process, call, line) in order; a call that was interrupted in the trace counts once."""
    found = []
    for line in trace.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +([a-z_0-9]+)\(", line)
        if match:
            found.append((int(match[1]), match[2], line))
    return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str, str]], int]:
    """All calls, and how many paths are shown below /tmp: each sandbox binds those in its own."""
    trace = tmp_path_factory.mktemp("strace") / "trace"
    command = ["strace", "-f", "-qq", "-s", "32", "-o", str(trace), sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, check=True, timeout=60, env=dict(os.environ), capture_output=True
    )
    return _calls(trace), int(done.stdout)


@pytest.fixture
def calls(traced: tuple[list[tuple[int, str, str]], int]) -> list[tuple[int, str, str]]:
    return traced[0]


def _between(calls: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    begin = next(n for n, call in enumerate(calls) if '"begin"' in call[2])
    end = next(n for n, call in enumerate(calls) if '"end"' in call[2])
    return calls[begin + 1 : end]


def test_a_run_costs_the_host_few_system_calls(calls: list[tuple[int, str, str]]) -> None:
    host = next(call[0] for call in calls if '"begin"' in call[2])
    made = Counter(name for pid, name, _ in _between(calls) if pid == host)
    assert 10 < made.total() <= HOST_MOST, made
    assert not {"clone", "clone3", "fork", "vfork"} & set(made), "nothing is forked from the host"


def test_little_lies_between_the_request_and_the_command(
    calls: list[tuple[int, str, str]],
) -> None:
    during = _between(calls)
    command = next(pid for pid, name, _ in during if name == "execve")
    before: list[str] = []
    for pid, name, _ in during:
        if pid == command:
            before.append(name)
            if name == "execve":
                break
    assert 5 < len(before) <= TO_EXEC_MOST, before
    assert not {"clone", "clone3", "mount", "seccomp"} & set(before), "all of that was done ahead"


def test_making_a_sandbox_does_not_build_the_root_again(
    traced: tuple[list[tuple[int, str, str]], int],
) -> None:
    calls, below_tmp = traced
    by_process: defaultdict[int, list[str]] = defaultdict(list)
    for pid, name, _ in calls:
        by_process[pid].append(name)
    sandboxes = [names for names in by_process.values() if "seccomp" in names]
    assert len(sandboxes) >= 4
    for names in sandboxes:
        made = names[: names.index("seccomp") + 1]
        assert len(made) <= MADE_MOST, Counter(made)
        assert "pivot_root" not in made
        assert made.count("open_tree") == made.count("move_mount") == below_tmp
        # An ordinary user's keys are hidden: two files, two calls for each.
        own = 4 + (0 if os.geteuid() == 0 else 4)
        assert made.count("mount") <= own, "/proc, /tmp, /dev/shm, the directory of the script"
