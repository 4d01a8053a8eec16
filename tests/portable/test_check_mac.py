"""The script for the first person who has a Mac works, as far as the stand-in can show it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from scripts import check_mac
from tests.portable.engine import ROOT

if TYPE_CHECKING:
    from tests.portable.engine import Engine

PART = "tests/contract/test_basics.py"


@pytest.mark.spec("P3")
@pytest.mark.timeout(200)
def test_questions_and_suites_end_in_a_summary(engine: Engine) -> None:
    done = engine.python("-W", "ignore", "-m", "scripts.check_mac", PART)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.rindex("\n{\n") :])
    # What the kernel of a Mac does cannot be seen here; that each question is answered can.
    assert set(found["answers"]) == set(check_mac.QUESTIONS)
    assert not [text for text in found["answers"].values() if "Error" in text]
    assert found["answers"]["start of a command"].endswith(" ms")
    for way in ("none", "sandbox-exec"):
        assert found["suites"][way]["unexpected"] == []
        assert " passed" in found["suites"][way]["summary"]


def test_elsewhere_it_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.check_mac"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 2
    assert "run it on macOS" in done.stderr
