"""``sbx version``."""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING

from union.sandbox._version import __version__

if TYPE_CHECKING:
    import argparse

__all__ = ["version"]


def version(options: argparse.Namespace) -> int:
    found = {"sbx": __version__, "python": platform.python_version(), "system": platform.platform()}
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("".join(f"{name} {value}\n" for name, value in found.items()))
    return 0
