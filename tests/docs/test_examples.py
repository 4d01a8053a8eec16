"""The shipped programs run from any directory and print the expected output."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO_LIMIT_S = 45.0


def run(*argv: str, where: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=where,
        env={**os.environ, **env},
    )


def test_quickstart(tmp_path: Path):
    done = run(str(ROOT / "examples/quickstart.py"), where=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "0 ['1', '2', '3']\n6\nb'1\\n2\\n3\\n'\n"
    assert done.returncode == 0


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], float]:
    begun = time.monotonic()
    done = run(str(ROOT / "examples/demo.py"), where=tmp_path_factory.mktemp("demo"))
    return done, time.monotonic() - begun


def test_the_demo_succeeds_quickly(demo):
    done, taken = demo
    assert (done.returncode, done.stderr) == (0, "")
    assert taken < DEMO_LIMIT_S


def test_the_demo_is_plain_text_when_not_on_a_terminal(demo):
    assert "\x1b" not in demo[0].stdout


def test_the_demo_shows_every_step(demo):
    text = demo[0].stdout
    for expected in (
        "ValueError: could not convert string to float: '1,310.25'",
        "+ tinytable==1.0",
        '{"best": "South", "totals": {"North": 2184.5, "South": 2416.0, "West": 1342.5}}',
        "exit code 143, reason 'timeout'",
        "no_new_privs  yes",
        "the work dir is gone",
    ):
        assert expected in text
    assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 11)]


def test_every_attack_of_the_demo_is_blocked_for_the_right_reason(demo):
    text = demo[0].stdout
    assert "ESCAPED" not in text
    verdicts = re.findall(r"^   blocked +(.{34}) (.*)$", text, re.MULTILINE)
    reasons = [reason.rpartition(": ")[2].rpartition(" - ")[2] for _, reason in verdicts]
    assert reasons == [
        "No such file or directory",
        "not visible",
        "[Errno 111] Connection refused",
        "[Errno 101] Network is unreachable",
        "No such process",
        "[Errno 1] Operation not permitted",
        "Read-only file system",
    ]


def test_the_demo_streams(demo):
    stamps = re.findall(r"^ +([\d.]+) s  step \d of 5$", demo[0].stdout, re.MULTILINE)
    times = [float(stamp) for stamp in stamps]
    assert len(times) == 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # A busy machine delays a line, never all of them until the end.
    assert max(gaps) >= 0.1, "the lines must come as they are printed, not all at once"
