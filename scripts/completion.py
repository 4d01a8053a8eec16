"""Generate the shell completion scripts of ``sbx``: ``python -m scripts.completion``.

The scripts are committed below ``src/union/sandbox/_cli/completions``, so that an installed ``sbx``
needs neither the generator nor a look into argparse. A test compares them with the parser.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import shtab

from union.sandbox._cli.parser import SHELLS, make_parser

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "src" / "union" / "sandbox" / "_cli" / "completions"


def _mark_path(action: argparse.Action, kind: Literal["file", "directory"]) -> None:
    action.complete = shtab.FILE if kind == "file" else shtab.DIRECTORY  # type: ignore[attr-defined]


def scripts() -> dict[Path, str]:
    """Return the text of every script by its path."""
    parser = make_parser(_mark_path)
    return {DIRECTORY / f"sbx.{shell}": shtab.complete(parser, shell) + "\n" for shell in SHELLS}


def main() -> None:
    """Write the scripts."""
    DIRECTORY.mkdir(exist_ok=True)
    for path, text in scripts().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
