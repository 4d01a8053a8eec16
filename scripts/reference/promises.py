"""The page about promises: each row of the specification, and the tests that name it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_spec_rows import NOT_YET, SPEC, marked_in

ROOT = Path(__file__).resolve().parents[2]

INTRO = """\
# Promises

<!-- Written by `make docs` from SPEC.md and the marks in the tests. -->

What you may rely on, row by row, with the tests that prove it. A test says which rows it proves
(`@pytest.mark.spec("C7")`), so each link leads to a file in which that mark can be found. A row
without a test does not pass `make test`; what is promised and not built yet is said to be so.
"""


def proofs() -> dict[str, list[str]]:
    """Return the test files by the rows that they name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for row in marked_in(path.read_text(encoding="utf-8")):
            found.setdefault(row, []).append(path.relative_to(ROOT).as_posix())
    return found


def page() -> str:
    """Return the whole page."""
    found = proofs()
    parts = [INTRO]
    text = SPEC.read_text(encoding="utf-8")
    for section in re.split(r"^## (?=[A-Z]\. )", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        parts.append(f"## {title}\n")
        rows = re.findall(
            rf"^- ({section[0]}[0-9]+) (.*?)(?=^- |\Z)", body, re.MULTILINE | re.DOTALL
        )
        for row, promise in rows or [(section[0], body)]:
            parts.append(f"### {row}\n")
            parts.append(f"{promise.strip()}\n")
            if row in NOT_YET:
                parts.append(f"*Not yet:* {NOT_YET[row]}.\n")
            links = [f"[{f.removeprefix('tests/')}](../../{f})" for f in found.get(row, [])]
            if links:
                parts.append(f"Proved by {', '.join(links)}.\n")
    return "\n".join(parts)
