"""``sbx doctor``: the report of ``union.sandbox.doctor()``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["doctor"]


def doctor(options: argparse.Namespace) -> int:
    """0 if sandboxes can be made here, else 1."""
    from union import sandbox

    report = sandbox.doctor()
    text = json.dumps(report.to_dict(), ensure_ascii=False) if options.json else str(report)
    sys.stdout.write(f"{text}\n")
    return 0 if report.ok else 1
