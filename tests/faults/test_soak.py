"""A soak: mixed load, at least thirty kills, and then everything as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.soak import arguments
from scripts.soaking import page
from scripts.soaking.excuses import Excuses, Kill, Target
from scripts.soaking.load import Scene, WrongError

from union import sandbox as sb
from union.sandbox.errors import SandboxConnectionError

ROOT = Path(__file__).resolve().parents[2]
KILLS = 30


def soaked(tmp_path: Path) -> Path:
    """The summary of the soak that `make test-all` runs beside the tests, else of a short one."""
    if given := os.environ.get("SOAK_SUMMARY"):
        return Path(given)
    output = tmp_path / "summary"
    options = ["--minutes", "0.5", "--most-minutes", "3", "--kills", str(KILLS), "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.soak", *options, "--output", str(output)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, (done.stdout[-5000:], done.stderr[-2000:])
    return output


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.spec("B2", "D8", "G4")
@pytest.mark.timeout(300)
def test_a_soak_leaves_everything_as_it_was(tmp_path: Path) -> None:
    summary = soaked(tmp_path)
    assert summary.exists(), "the soak ended without a summary: `make test-all` shows its log"
    report = json.loads(summary.read_text())
    print({name: report[name] for name in ("seconds", "runs", "sessions", "kills", "errors")})
    assert report["problems"] == []
    assert (report["ok"], report["wrong"], report["left"]) == (True, [], [])
    assert report["kills"] >= KILLS
    assert report["runs"] > 100
    assert report["sessions"] > 10
    assert sum(report["errors"].values()) < report["runs"]
    # The page that is made of such a summary says the same.
    text = page.render(report)
    assert "Passed" in text
    assert f"| processes killed | {report['kills']:,} |" in text


# What a kill excuses.

HERE = Target(is_remote=False, place="a")
OPENING = Target(is_remote=False, place=None)
THERE = Target(is_remote=True, place="http://one")
DIED = sb.SandboxExecutionError("gone")
LOST = SandboxConnectionError("gone", endpoint="http://one", sent=True, code="session-lost")


LOST_CELL, WRONG_CELL = WrongError("the interpreter ended"), WrongError("another value")
LOST_CELL.is_lost = True


def wrong(*found: object) -> WrongError:
    with pytest.raises(WrongError) as caught:
        Scene.expect(None, found, (0, ""), "true")  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    "role, hit, target, exc, excused",
    [
        ("first process", "a", HERE, LOST_CELL, True),
        ("first process", "b", HERE, LOST_CELL, False),
        ("server's launcher", "http://one", THERE, LOST_CELL, True),
        ("server", "http://one", THERE, LOST_CELL, False),
        ("launcher", None, HERE, WRONG_CELL, False),
        ("first process", "a", HERE, DIED, True),
        ("first process", "b", HERE, DIED, False),
        ("first process", None, HERE, DIED, True),
        ("first process", "b", OPENING, DIED, True),
        ("launcher", None, HERE, DIED, True),
        ("launcher", None, HERE, sb.SandboxExecutionError("full", code="spawn-EMFILE"), False),
        ("launcher", None, HERE, sb.SandboxUsageError("no"), False),
        ("launcher", None, HERE, ValueError("no"), False),
        ("launcher", None, HERE, wrong(137, "signal"), False),
        ("launcher", None, THERE, DIED, False),
        ("spare", "a", HERE, wrong(137, "signal"), True),
        ("spare", "b", HERE, wrong(137, "signal"), False),
        ("spare", "a", HERE, wrong(137, "timeout"), False),
        ("spare", "a", HERE, wrong(1, ""), False),
        ("server", "http://one", THERE, LOST, True),
        ("server", "http://two", THERE, LOST, False),
        ("server", "http://one", HERE, LOST, False),
        ("server", "http://one", THERE, DIED, False),
        ("server's launcher", "http://one", THERE, DIED, True),
        ("server's launcher", "http://one", THERE, LOST, False),
    ],
)
def test_a_kill_excuses_what_it_can_cause_in_what_it_hit(
    role: str, hit: str | None, target: Target, exc: Exception, *, excused: bool
) -> None:
    excuses = Excuses()
    assert not excuses.excuses(exc, target, begun=100.0)
    excuses.add(Kill(role, 99.0, hit))
    assert excuses.excuses(exc, target, begun=100.0) == excused
    assert sum(excuses.used.values()) == excused


def test_a_kill_of_long_ago_excuses_nothing_but_a_server_that_is_gone() -> None:
    excuses = Excuses()
    excuses.add(Kill("launcher", 10.0, None))
    excuses.add(Kill("server", 10.0, "http://one"))
    assert not excuses.excuses(DIED, HERE, begun=100.0)
    assert excuses.excuses(LOST, THERE, begun=100.0)


# The rest.


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
