"""Write the page about guarantees: each row of the specification, and the tests that prove it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_spec_rows import NOT_YET, SPEC, marked_in

ROOT = Path(__file__).resolve().parents[2]

INTRO = """\
# Guarantees

<!-- Written by `make docs` from SPEC.md and the marks in the tests. -->

This page lists every guarantee of the specification with the tests that prove it. A test names its
rows in a mark (`@pytest.mark.spec("C7")`), and each link leads to a file with that mark. `make
test` fails for a row without a test. Rows that are not implemented yet are marked as such.
"""


def proofs() -> dict[str, list[str]]:
    """Return the test files of each row."""
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
