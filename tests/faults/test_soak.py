"""A short soak: mixed load, at least sixty kills, and then everything as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.soak import arguments
from scripts.soaking import page

# It counts the processes and descriptors of the machine's busiest program.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
KILLS = 60


@pytest.mark.slow
@pytest.mark.spec("B2", "D8", "G4")
@pytest.mark.timeout(300)
def test_a_short_soak_leaves_everything_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "summary"
    options = ["--minutes", "0.66", "--most-minutes", "3", "--kills", str(KILLS), "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.soak", *options, "--output", str(output)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    told = json.loads(output.read_text() if output.exists() else "{}")
    assert done.returncode == 0, (told.get("wrong"), told.get("left"), done.stderr[-2000:])
    print({name: told[name] for name in ("seconds", "runs", "sessions", "kills", "errors")})
    assert (told["ok"], told["wrong"], told["left"]) == (True, [], [])
    assert told["kills"] >= KILLS
    assert told["runs"] > 100
    assert told["sessions"] > 10
    assert sum(told["errors"].values()) < told["runs"]
    # The page that is made of such a summary says the same.
    text = page.render(told)
    assert "Passed" in text
    assert f"| processes killed | {told['kills']:,} |" in text


def test_the_page_of_the_soak_is_one_that_the_tool_wrote() -> None:
    text = (ROOT / "docs/reference/soak.md").read_text()
    assert text.startswith(page.TEXT.split("{", 1)[0])
    assert "Passed" in text


@pytest.mark.parametrize(
    "given", [["--minutes", "0"], ["--minutes", "5000"], ["--workers", "0"], ["--nonsense"]]
)
def test_options_that_make_no_sense_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
