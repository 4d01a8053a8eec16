"""Every program in the Flyte guide runs, saved under its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import ROOT, blocks_in

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "guides" / "flyte.md"
BLOCKS = blocks_in(PAGE.read_text(encoding="utf-8"), page="docs/guides/flyte.md")


def name_of(source: str) -> str:
    found = re.match(r"# (\w+\.py)\n", source)
    assert found, source
    return found[1]


@pytest.mark.spec("I4", "I5", "I8")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: name_of(block.source))
def test_a_program_of_the_page_prints_the_shown_output(block, tmp_path: Path):
    for other in BLOCKS:
        (tmp_path / name_of(other.source)).write_text(other.source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, name_of(block.source)],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (block.output or "")
    assert "Unclosed" not in done.stderr


def test_arguments_and_fields_on_the_page_exist():
    import dataclasses
    import inspect

    from union import sandbox as sb

    text = PAGE.read_text(encoding="utf-8")
    tables = re.findall(r"\|---\|---\|\n((?:\|.*\n)+)", text)
    assert len(tables) == 2
    first, second = (
        {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        for rows in tables
    )
    assert first == set(inspect.signature(sb.session).parameters)
    assert second <= {field.name for field in dataclasses.fields(sb.SandboxEnvironment)}
