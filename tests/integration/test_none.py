"""``none`` isolates nothing and warns at each open; the rest is as with any backend."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import eventually, session_of

from union import sandbox as sb

TWICE = """\
import asyncio
from union import sandbox as sb

async def main():
    for _ in range(2):
        async with sb.on_device.session(backend="none"):
            pass

asyncio.run(main())
"""


@pytest.mark.spec("G1")
def test_the_warning_is_shown_at_each_open_and_names_the_callers_line(tmp_path: Path) -> None:
    """Under Python's own filter, which shows a plain warning once per line."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=30
    )
    shown = [line for line in done.stderr.splitlines() if "isolates nothing" in line]
    assert [line.startswith(f"{script}:6: UserWarning:") for line in shown] == [True, True]


@pytest.mark.spec("G1")
async def test_nothing_is_hidden_and_the_report_shows_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("seen")
    async with session_of("none", network_mode="blocked") as sbx:
        assert (await sbx.exec(f"cat {tmp_path}/mine")).stdout == "seen"
        assert (await sbx.exec(f"test -d /proc/{os.getpid()}/fd")).ok
        # There is no proxy of ours, so no variable names one: clients would only fail.
        assert "proxy" not in (await sbx.exec("env")).stdout.lower()
        report = sbx.isolation
    assert (report.namespaces, report.seccomp, report.capabilities) == ((), "", None)
    assert {report.root, report.proc, report.ids} == {"host"}
    assert report.egress == "none"


@pytest.mark.spec("G1", "G3")
async def test_limits_are_enforced() -> None:
    limits = sb.Resources(memory="64Mi")
    async with session_of("none", resources=limits) as sbx:
        result = await sbx.exec("b = bytearray(300 << 20); print(len(b))", script_type="python")
    assert result.termination_reason == "oom"
    assert result.stdout == ""


@pytest.mark.spec("G1", "C7", "C8")
async def test_the_whole_tree_ends_with_its_command_and_its_session(tmp_path: Path) -> None:
    """Also processes that have left the command's session and parent."""
    mark = f"87654.{os.getpid()}"
    daemon = f"setsid sh -c 'setsid sleep {mark} & sleep {mark}' & "
    async with session_of("none") as sbx:
        result = await sbx.exec(daemon + f"echo out; sleep {mark}", timeout_s=1.5)
        assert (result.stdout, result.termination_reason) == ("out\n", "timeout")
        assert eventually(lambda: not _sleepers(mark))
        await sbx.exec(daemon + "echo left")
        assert eventually(lambda: not _sleepers(mark))
        await sbx.run(daemon + f"sleep {mark}", background=True)
        assert eventually(lambda: _sleepers(mark) == 3)
    assert _sleepers(mark) == 0


def _sleepers(mark: str) -> int:
    wanted = f"sleep\0{mark}\0".encode()
    found = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += file.read_bytes() == wanted
    return found
