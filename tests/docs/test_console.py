"""The console sessions in the pages run and print the output that the pages show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.tool import SBX
from tests.conftest import ISOLATED
from tests.docs.blocks import PAGES, ROOT

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sessions_in(text: str) -> list[tuple[str, str]]:
    """Return (command, output) of every line that begins with a prompt."""
    found = []
    for block in _BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


TYPED = {
    page.relative_to(ROOT).as_posix(): found
    for page in PAGES
    if (found := sessions_in(page.read_text(encoding="utf-8")))
}


def test_the_finder_sees_commands_and_outputs() -> None:
    text = "a\n```console\n$ one\n1\n2\n$ two\n```\n```sh\n$ no\n```\n"
    assert sessions_in(text) == [("one", "1\n2\n"), ("two", "")]
    assert "docs/guides/sbx.md" in TYPED


@pytest.mark.spec("H")
@pytest.mark.parametrize("page", TYPED)
def test_what_is_typed_answers_what_the_page_shows(page: str, tmp_path: Path) -> None:
    python, *arguments = SBX
    # The pages use the default backend, which may not be installed; any backend is fine.
    chosen = f'run) shift; set -- run --backend {ISOLATED[0]} "$@" ;;'
    call = " ".join(f"'{word}'" for word in (python, *arguments))
    (tmp_path / "sbx").write_text(f'#!/bin/sh\ncase $1 in {chosen} esac\nexec {call} "$@"\n')
    (tmp_path / "sbx").chmod(0o755)
    bin_dir = Path(sys.executable).parent  # of the virtualenv that has the package
    for command, output in TYPED[page]:
        done = subprocess.run(
            ["sh", "-c", f'PATH="{tmp_path}:{bin_dir}:$PATH"; {{ {command}\n}} 2>&1'],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=30,
            cwd=tmp_path,
        )
        assert done.stdout == output, command
