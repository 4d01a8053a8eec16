"""A thousand sessions that do nothing cost next to nothing, and leave nothing."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = 1000
FILES_EACH = 8
NAMESPACES_KEPT = 16


@pytest.mark.slow
@pytest.mark.spec("B2", "B8", "G4")
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < SESSIONS * FILES_EACH,
    reason=f"needs a hard limit of {SESSIONS * FILES_EACH} open files (ulimit -Hn)",
)
def test_a_thousand_idle_sessions_are_light_and_leave_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.many_sessions", str(SESSIONS)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (done.returncode, done.stderr) == (0, "")
    states = json.loads(done.stdout)
    before, opened, idle, closed = (states[k] for k in ("before", "opened", "idle", "closed"))
    only_the_launcher = before["processes"]
    assert only_the_launcher == 1

    # While they are idle: no process of theirs, and less than 1 MiB of ours and the launcher's.
    assert opened["dirs"] == idle["dirs"] == SESSIONS
    assert opened["locks"] == idle["locks"] == SESSIONS
    assert (idle["processes"], idle["spares"]) == (only_the_launcher, 0)
    assert idle["resident_kib"] - before["resident_kib"] < SESSIONS * 1024
    assert sum(idle["descriptors"].values()) < SESSIONS * FILES_EACH

    # They still answer, each from a sandbox of its own.
    assert all(answer.split()[1:] == ["here"] for answer in states["answers"])

    # Closed: everything is as it was before, but for a few user namespaces kept for later sessions.
    assert closed["descriptors"].pop("user") <= NAMESPACES_KEPT + before["descriptors"].pop("user")
    # Everything else is as it was. Memory may stay with the allocator, but little of it.
    for what in ("descriptors", "of_launcher", "processes", "dirs", "locks", "spares"):
        assert closed[what] == before[what], what
    assert closed["resident_kib"] - before["resident_kib"] < 64 * 1024
