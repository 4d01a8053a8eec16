"""Every Python block in the pages runs and prints the shown output; links resolve."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import tarfile
import traceback
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import PAGES, ROOT, Block, blocks_in, links_in

from union import sandbox as sb

if TYPE_CHECKING:
    from pathlib import Path

# Separate tests run their code.
ELSEWHERE = {"docs/guides/flyte.md", "docs/guides/remote.md"}
ADAPTERS = ROOT / "docs" / "adapters"
"""Its programs need frameworks: tests/adapters runs them, in the environment of each."""
WITH_CODE = {
    page.relative_to(ROOT).as_posix(): found
    for page in PAGES
    if page.relative_to(ROOT).as_posix() not in ELSEWHERE
    and not page.is_relative_to(ADAPTERS)
    and (
        found := blocks_in(page.read_text(encoding="utf-8"), page=page.relative_to(ROOT).as_posix())
    )
}


async def run_block(block: Block, names: dict[str, object]) -> None:
    """Run a block with top-level await, with the names of the page."""
    # Leading blank lines make a traceback show the line of the page.
    code = compile(
        "\n" * (block.line - 1) + block.source,
        block.page,
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result


def run_program(block: Block, where: Path) -> str:
    """Run a block that is a whole program; return its output."""
    script = where / f"line{block.line}.py"
    script.write_text(block.source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=where,
    )
    assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stderr}"
    return done.stdout


def test_blocks_lines_and_outputs_are_found():
    text = "a\n```python\nx = 1\n```\n\n```text\n1\n```\n\n```sh\nls\n```\n"
    text += "```py\ny\n```\nb\n```text\nz\n```\n"
    assert blocks_in(text, page="p") == [
        Block(page="p", line=3, source="x = 1\n", output="1\n"),
        Block(page="p", line=14, source="y\n", output=None),
    ]
    assert links_in("[a](b.md#c) [d](https://e) [f](#g) `[h]`\n```text\n[i](j)\n```\n") == ["b.md"]


async def test_a_block_that_fails_names_the_line_of_its_page():
    block = Block(page="page.md", line=40, source="ok = 1\nawait nothing\n", output=None)
    with pytest.raises(NameError) as caught:
        await run_block(block, {})
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == ("page.md", 41)


def test_the_readme_has_a_quickstart_that_is_the_example():
    programs = [block for block in WITH_CODE["README.md"] if block.is_program]
    assert len(programs) == 1
    assert programs[0].output is not None
    steps = {line.strip() for line in programs[0].source.splitlines() if "sbx." in line}
    shipped = {
        line.strip()
        for line in (ROOT / "examples/quickstart.py").read_text(encoding="utf-8").splitlines()
    }
    assert steps <= shipped


@pytest.mark.parametrize("page", WITH_CODE)
async def test_the_code_of_a_page_prints_the_shown_output(
    page: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    unpacks = any(".extract(" in block.source for block in WITH_CODE[page])
    if unpacks and not hasattr(tarfile, "tar_filter"):
        pytest.skip("extract() in a machine needs Python 3.11.4 or newer, and says so")
    monkeypatch.chdir(tmp_path)  # A page may write files.
    names: dict[str, object] = {"__name__": "__main__", "asyncio": asyncio, "sb": sb}
    async with sb.on_device.session(backend="userns") as sbx:
        for block in WITH_CODE[page]:
            names["sbx"] = sbx  # A block may have opened a session of the same name.
            capsys.readouterr()
            if block.is_program:
                printed = await asyncio.to_thread(run_program, block, tmp_path)
            else:
                await run_block(block, names)
                printed = capsys.readouterr().out
            if block.output is not None:
                assert printed == block.output, f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_linked_files_exist(page: Path):
    missing = [
        target
        for target in links_in(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_make_targets_that_pages_name_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(
            r"(?:^ {4}|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert named >= {"demo", "test", "bench", "lint"}
    assert named <= targets


def test_files_that_the_architecture_page_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.(?:py|c)\b", text))
    assert len(named) > 15
    homes = [ROOT, ROOT / "src" / "union" / "sandbox"]
    assert [n for n in sorted(named) if not any((h / n).exists() for h in homes)] == []


def test_the_architecture_page_is_one_page():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_pages_contain_no_local_path():
    here = [str(ROOT), os.path.expanduser("~")]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = [p for p in here if len(p) > 4 and re.search(rf"{re.escape(p)}(?!\w)", text)]
        assert found == [], page
