"""The examples in docstrings print what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts.reference.docstrings import prose

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SRC / "union" / "sandbox").rglob("*.py"))
    if "\n>>> " in (text := path.read_text(encoding="utf-8")) or "\n    >>> " in text
]


def test_there_are_examples():
    assert {"union.sandbox", "union.sandbox.on_device", "union.sandbox.testing"} <= set(MODULES)


# In a new process: a class that was used by its public name gets the package as its module, and
# doctest skips objects of other modules.
PROGRAM = """\
import doctest, importlib, sys
done = doctest.testmod(importlib.import_module(sys.argv[1]))
sys.exit(done.failed > 0 or done.attempted == 0)
"""


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr or "no example was found"


def test_google_sections_become_lists():
    text = """Open it.

    Args:
        path: The file, ``"x"`` by default.
            It must exist.
        mode (int): Permission bits.

    Returns:
        The content,
        as bytes.

    Raises:
        OSError: It cannot be read.

    The end.
    """
    assert prose(text).splitlines() == [
        "Open it.",
        "",
        "Arguments:",
        "",
        '- `path`: The file, `"x"` by default. It must exist.',
        "- `mode`: Permission bits.",
        "",
        "Returns:",
        "",
        "- The content, as bytes.",
        "",
        "Raises:",
        "",
        "- `OSError`: It cannot be read.",
        "",
        "The end.",
    ]
