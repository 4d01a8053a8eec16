"""A memory limit around the whole process, as a cluster sets one on a pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import cgroup
from union.sandbox.cluster import _pod_memory
from union.sandbox.cluster._pod_memory import within_pod
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20
LIMIT = 400 * MIB


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with a memory limit, for a process that moves into it."""
    where = cgroup.hierarchy()
    if where is None:
        pytest.skip("no control group can be made here: run as root, or with a delegated group")
    place = Path(dict(where.places)["memory"]) / f"sandbox-test-pod-{os.getpid()}"
    place.mkdir()
    name = "memory.max" if where.version == 2 else "memory.limit_in_bytes"
    (place / name).write_text(str(LIMIT))
    for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
        with contextlib.suppress(OSError):
            if (place / swap).exists():
                (place / swap).write_text("0" if where.version == 2 else str(LIMIT))
    yield place
    place.rmdir()


# As in a pod: the process is in the group, and can make no group of its own.
BEGIN = """
import asyncio, json, os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from union.sandbox._linux import cgroup
cgroup.hierarchy = lambda: None
from union import sandbox as sb
"""


def in_group(place: Path, body: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(body), str(place)],
        check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return json.loads(done.stdout)


def test_the_limit_of_the_own_group_is_read(limited: Path):
    found = in_group(limited, "print(json.dumps({'limit': cgroup.memory_limit()}))")
    assert found == {"limit": LIMIT}


@pytest.mark.spec("G3")
def test_a_run_gets_what_the_server_leaves_and_exceeding_it_is_oom(limited: Path):
    found = in_group(
        limited,
        """
        from union.sandbox.cluster._pod_memory import within_pod
        async def main():
            resources = sb.Resources(**within_pod({})["resources"])
            async with sb.on_device.session(backend="userns", resources=resources) as sbx:
                hog = await sbx.exec("python3 -c 'x = [bytearray(2**20) for _ in range(600)]'")
                after = await sbx.exec("echo alive")
            outcome = [hog.termination_reason, hog.returncode, after.stdout]
            return {"memory": resources.memory, "outcome": outcome}
        print(json.dumps(asyncio.run(main())))
        """,
    )
    assert 100 * MIB < found["memory"] < LIMIT - 64 * MIB
    assert found["outcome"] == ["oom", 137, "alive\n"]


@pytest.mark.spec("G3")
def test_the_kernel_ends_sandboxes_before_the_server_and_that_is_oom(limited: Path):
    """Several runs together, each below its own limit, exceed the limit of the whole group."""
    found = in_group(
        limited,
        """
        hog = "x = [bytearray(2**20) for _ in range(150)]; import time; time.sleep(20)"
        async def main():
            ballast = bytearray(100 * 2**20)  # More than any single process of a sandbox has.
            resources = sb.Resources(memory=380 * 2**20)
            async with sb.on_device.session(backend="userns", resources=resources) as sbx:
                both = [asyncio.create_task(sbx.exec(["python3", "-c", hog])) for _ in range(4)]
                done, left = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                reasons = [task.result().termination_reason for task in done]
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                after = await sbx.exec("echo alive")
            return {"reasons": reasons, "kills": cgroup.oom_kills(), "after": after.stdout}
        print(json.dumps(asyncio.run(main())))
        """,
    )
    assert found["kills"] > 0, "the control: the kernel had to kill"
    assert set(found["reasons"]) == {"oom"}
    assert found["after"] == "alive\n"


def test_a_lower_limit_of_the_session_stays(monkeypatch):
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 4096 * MIB)
    assert within_pod({"resources": {"memory": 8 * MIB, "cpu": 1}})["resources"] == {
        "memory": 8 * MIB,
        "cpu": 1,
    }
    assert within_pod({})["resources"]["memory"] < 4096 * MIB - _pod_memory._RESERVE + 1
    monkeypatch.setattr(cgroup, "memory_limit", lambda: None)
    assert within_pod({"env": {}}) == {"env": {}}


def test_a_pod_that_is_too_small_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 64 * MIB)
    with pytest.raises(SandboxExecutionError, match="too little for a run") as caught:
        within_pod({})
    assert caught.value.code == "pod-memory"
    assert "resources=" in caught.value.hint
