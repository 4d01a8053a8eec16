"""A first look at every way: it opens, runs, keeps and forgets what it should."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from union import sandbox as sb


@pytest.mark.spec("B1", "C1", "D1")
async def test_a_command_runs_and_its_output_comes_back(sbx: sb.Session) -> None:
    proc = await sbx.run("echo out; echo err >&2; exit 5", stdout=True, stderr=True)
    assert await proc.communicate() == (b"out\n", b"err\n")
    assert (proc.returncode, proc.termination_reason) == (5, "")


@pytest.mark.spec("B4")
async def test_the_work_dir_persists(sbx: sb.Session) -> None:
    await sbx.run("echo kept > file")
    assert (await sbx.exec("cat file")).stdout == "kept\n"
