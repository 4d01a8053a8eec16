"""Source files have a maximum length."""

from __future__ import annotations

import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600
MEDIAN_UNDER = 250

PYTHON = sorted((ROOT / "src").rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in {".c", ".h"})


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_there_is_something_to_measure():
    assert PYTHON
    assert NATIVE


def test_no_file_is_longer_than_the_cap():
    lengths = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in [*PYTHON, *NATIVE]}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_the_median_file_is_short():
    assert statistics.median(lines_of(path) for path in [*PYTHON, *NATIVE]) < MEDIAN_UNDER
