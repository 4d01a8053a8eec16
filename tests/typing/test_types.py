"""User programs as type checkers see them: correct ones pass, and every mistake is found."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ACCEPTED = sorted((HERE / "accepted").glob("*.py"))
REFUSED = sorted((HERE / "refused").glob("*.py"))
MARK = "# mistake"
Found = dict[str, set[int]]


@functools.cache
def mypy() -> Found:
    """The lines with errors, by file."""
    files = [str(path) for path in (*ACCEPTED, *REFUSED)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--output=json"),
            *files,
        ],
        capture_output=True,
        text=True,
        cwd=HERE,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return _by_file(
        (HERE / report["file"], report["line"])
        for report in reports
        if report["severity"] == "error"
    )


@functools.cache
def pyright() -> Found:
    """The same, found by the other checker."""
    files = [str(path) for path in (*ACCEPTED, *REFUSED)]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *files],
        capture_output=True,
        text=True,
        cwd=HERE,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return _by_file(
        (Path(report["file"]), report["range"]["start"]["line"] + 1)
        for report in json.loads(done.stdout)["generalDiagnostics"]
        if report["severity"] == "error"
    )


def _by_file(reports) -> Found:
    found: Found = {}
    for path, line in reports:
        found.setdefault(path.name, set()).add(line)
    return found


CHECKERS = {"mypy": mypy, "pyright": pyright}


@pytest.mark.timeout(180)
@pytest.mark.spec("A1")
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", ACCEPTED, ids=lambda path: path.stem)
def test_a_correct_program_is_accepted(checker: str, program: Path) -> None:
    assert CHECKERS[checker]().get(program.name, set()) == set()


@pytest.mark.timeout(180)
@pytest.mark.spec("A1")
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("program", REFUSED, ids=lambda path: path.stem)
def test_a_mistake_is_found(checker: str, program: Path) -> None:
    lines = program.read_text(encoding="utf-8").splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith(MARK)}
    assert len(expected) == 1
    assert CHECKERS[checker]().get(program.name, set()) == expected
