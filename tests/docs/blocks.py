"""Find the code blocks of a Markdown page and their expected output."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda p: p.relative_to(ROOT)
)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of Python. ``output`` is None if the page shows none."""

    page: str
    line: int
    """Line number of its first line of code."""
    source: str
    output: str | None

    @property
    def is_program(self) -> bool:
        """Return whether it starts its own event loop."""
        return "asyncio.run(" in self.source


def blocks_in(text: str, *, page: str) -> list[Block]:
    """Return the Python blocks of a page; a ``text`` block right after one is its output."""
    found = []
    fences = list(_FENCE.finditer(text))
    for fence, following in itertools.pairwise([*fences, None]):
        if fence is None or fence[2] not in {"python", "py"}:
            continue
        output = None
        if following is not None and following[2] == "text":
            between = text[fence.end() : following.start()]
            output = following[3] if not between.strip() else None
        line = text.count("\n", 0, fence.start(3)) + 1
        found.append(Block(page=page, line=line, source=fence[3], output=output))
    return found


def links_in(text: str) -> list[str]:
    """Return the targets of links to local files."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))
    return [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
