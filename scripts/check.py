"""`make check`: the fast loop, under a minute on two cores. `make test` is the gate.

It runs style, layer and type checks in parallel with the unit tests, the house rules and the
contract on one backend, without its repetition over the synchronous face and without the tests that
tests/tiers.toml leaves out. Arguments are passed to pytest: ``python -m scripts.check -k timeout``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from scripts.steps import NO_PLUGIN, STATIC, Step, report, wait
from tests import tiers

BACKEND = "userns"
MARKS = "not alone and not elsewhere and not slow and not sync_face"
TESTS = [
    *("-m", "pytest", "-q", *NO_PLUGIN, "-n", "3", "--dist", "loadgroup", "-p", "no:cacheprovider"),
    *("-m", f"{MARKS} and not {tiers.HEAVY}"),
    *(f"--ignore={path}" for path in sorted(tiers.whole_files(tiers.NOT_IN_CHECK))),
    f"--only-way={BACKEND}",
    *("tests/unit", "tests/house", "tests/contract"),
]


def main(arguments: list[str]) -> int:
    """Run all checks; return 1 if any of them failed."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sbx-check-")))
        steps = [
            stack.enter_context(Step(name, command, log=scratch / name))
            for name, command in STATIC.items()
        ]
        steps.append(stack.enter_context(Step("tests", [sys.executable, *TESTS, *arguments])))
        wait(steps)
    bad = [step.name for step in steps if step.failed]
    report(
        f"check: {'FAILED: ' + ', '.join(bad) if bad else 'OK'} in {time.monotonic() - begun:.0f}s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
