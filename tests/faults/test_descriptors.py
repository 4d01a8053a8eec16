"""A host process that has no descriptor left: reported, nothing lost, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.conftest import ISOLATED, eventually

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher

PROGRAM = """
import asyncio, json, os, resource, sys
from union import sandbox as sb
from union.sandbox.on_device import _workdir

async def main(backend):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
    sessions, errors, paths = [], [], set()
    for _ in range(100):
        one = sb.on_device.session(backend=backend)
        try:
            await one.open()
        except sb.SandboxError as exc:
            errors.append([type(exc).__name__, exc.code, exc.hint])
            break
        sessions.append(one)
        paths.add(one.work_dir)
    try:
        await sessions[0].run("true")
    except sb.SandboxError as exc:
        errors.append([type(exc).__name__, exc.code, exc.hint])
    for one in sessions[1:]:
        await one.close()
    usable = (await sessions[0].exec("echo usable")).stdout
    await sessions[0].close()
    mine = f"sandbox-{os.getpid()}-"
    left = [name for name in os.listdir(_workdir.default_parent()) if name.startswith(mine)]
    print(json.dumps({"opened": len(sessions), "errors": errors, "usable": usable, "left": left}))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.threat(113)
@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("limit", range(160, 166), ids=lambda n: f"{n} in all")
@pytest.mark.spec("D8")
def test_no_descriptor_left_is_reported_and_leaves_nothing(backend: str, limit: int) -> None:
    """A session takes five or six of them: so it is another one each time that is not there."""
    command = [sys.executable, "-c", PROGRAM, backend, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 3 <= found["opened"] < 100, "the positive control: some sessions did open"
    assert found["errors"], "opening, or the run after it, has failed"
    for kind, code, hint in found["errors"]:
        assert (kind, code) == ("SandboxExecutionError", "spawn-EMFILE")
        assert "ulimit -n" in hint
    assert found["usable"] == "usable\n"
    assert found["left"] == []
    assert "Traceback" not in done.stderr


LOW, HIGH = 80, 100
"""Descriptors of the launcher: a sandbox made between them has one with every fixed number."""


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.spec("C2", "K1")
async def test_the_numbers_of_descriptors_do_not_matter(backend: str) -> None:
    """A Python started ahead has descriptors with fixed numbers, which others may have before."""
    async with (
        sb.on_device.session(backend=backend) as holder,
        sb.on_device.session(backend=backend, warm=0) as sbx,
    ):
        # Sandboxes of an earlier test may be ending still. Each command adds one descriptor.
        assert eventually(lambda: launcher_descriptors() < LOW // 2)
        for _ in range(LOW - launcher_descriptors()):
            await holder.run("sleep 1000", background=True)
        for _ in range(HIGH - LOW):
            assert await sbx.run_code("print(41 + 1)") == "42\n"
            async with sbx.context() as ctx:
                assert (await ctx.run("6 * 7")).text == "42"
            await holder.run("sleep 1000", background=True)
        assert launcher_descriptors() >= HIGH - 2


def launcher_descriptors() -> int:
    return len(os.listdir(f"/proc/{Launcher.current().pid}/fd"))
