"""List lines with words that this project avoids: ``python -m scripts.language [PATH ...]``.

Programs do not speak: a message is sent, received or reported. Sentences name their subject.
Without a path, it checks the README, the documentation and all sources. The exit code is 1 if it
finds a line. It skips this file, which has to list the words.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OWN = Path(__file__).resolve()
ROOT = OWN.parents[1]
EVERYTHING = ("README.md", "SECURITY.md", "THREAT_MODEL.md", "docs", "native", "src")
AVOIDED = ("told", "said", "heard", "whoever", "nobody", "words of", "as many as it may")
SUFFIXES = frozenset({".c", ".css", ".h", ".html", ".js", ".md", ".py", ".toml"})
# A letter, a digit or a hyphen on either side makes it another word. An underscore does not, so
# names in code count as well.
_PATTERN = re.compile(
    r"(?<![A-Za-z0-9-])(?:" + "|".join(re.escape(word) for word in AVOIDED) + r")(?![A-Za-z0-9-])",
    re.IGNORECASE,
)
# The system account of that name: quoted, in a path, or in a line of a user database.
_ACCOUNT = re.compile(r"""["'`/:]nobody["'`/:]|\bnobody:nogroup\b""")


@dataclass(frozen=True, slots=True)
class Hit:
    """A line with an avoided word."""

    path: Path
    number: int
    word: str
    line: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.word!r}: {self.line.strip()[:120]}"


def avoided_in(line: str) -> list[str]:
    """Return the avoided words in one line, in lower case."""
    return [match[0].lower() for match in _PATTERN.finditer(_ACCOUNT.sub("", line))]


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the text files at and below ``paths``, except this one."""
    for path in paths:
        if path.is_dir():
            below = sorted(path.rglob("*"))
            yield from (p for p in below if p.suffix in SUFFIXES and p.is_file() and p != OWN)
        elif path.is_file():
            yield path
        else:
            raise FileNotFoundError(path)


def hits(paths: Iterable[Path]) -> list[Hit]:
    """Return each use of an avoided word at and below ``paths``."""
    found = []
    for path in files(paths):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [Hit(shown, number, word, line) for word in avoided_in(line)]
    return found


def main(arguments: list[str]) -> int:
    """Print the lines found; return 1 if there is any."""
    found = hits([ROOT / argument for argument in arguments or EVERYTHING])
    for hit in found:
        print(hit)
    print(f"{len(found)} uses of avoided words", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
