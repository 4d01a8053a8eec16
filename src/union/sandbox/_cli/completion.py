"""``sbx completion``: print a completion script that was generated at development time.

``python -m scripts.completion`` writes the scripts from the parser; a test compares them.
"""

from __future__ import annotations

import sys
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from importlib.resources.abc import Traversable

__all__ = ["completion", "script_of"]


def completion(options: argparse.Namespace) -> int:
    """Print the completion script of the shell that was named."""
    sys.stdout.write(script_of(options.shell).read_text(encoding="utf-8"))
    return 0


def script_of(shell: str) -> Traversable:
    """Return the file with the completion script of ``shell``."""
    return resources.files("union.sandbox._cli").joinpath("completions", f"sbx.{shell}")
