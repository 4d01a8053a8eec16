"""The project's own suite passes as a plain user and in an ordinary pod."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from tests.environments.places import LIMIT_S, NAMES, missing, open_place
from tests.environments.suite import BUILD_LIMIT_S, SUITES, Suite, staged_suite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.environments.supervise import Outcome

# Run by itself: each place has workers of its own.
pytestmark = pytest.mark.elsewhere

EVERYTHING = os.environ.get("EVERYWHERE") == "1"
"""Repeat everything in every place, for a change to the engine: it takes minutes more."""
REST = "-rest"
"""After the name of a place: the tests there that `make test` leaves out."""
# A place changes what the kernel lets the engine set up: opening, ending, owners of files, and the
# isolation itself. How the host then reads output or refuses arguments is the same everywhere.
CHOSEN = {
    # For `make test`: sessions open, and their root and identity hold. The rest is for the complete
    # run, which tests/tiers.toml lists.
    "unprivileged": (
        "tests/contract/test_basics.py",
        "tests/escape/test_filesystem.py",
        "tests/escape/test_ids_stay.py",
        "tests/escape/test_shared_root_id.py",
        "tests/escape/test_downgrade.py",
    ),
    "unprivileged-rest": (
        "tests/posture",
        "tests/contract/test_lifecycle.py",
        "tests/contract/test_files.py",
        "tests/checkpoints",
        "--ignore=tests/checkpoints/test_over_a_server.py",
        "tests/escape",
        "--ignore=tests/escape/test_filesystem.py",
        "--ignore=tests/escape/test_ids_stay.py",
        "--ignore=tests/escape/test_shared_root_id.py",
        "--ignore=tests/escape/test_downgrade.py",
        # The filter is a program that does not depend on the place; files and paths are the host's
        # work, and networks are used again in the same way by every user.
        "--ignore=tests/escape/test_kernel_surface.py",
        "--ignore=tests/escape/test_call_paths.py",
        "--ignore=tests/escape/test_event_loop.py",
        "--ignore=tests/escape/test_file_api.py",
        "--ignore=tests/escape/test_file_trees.py",
        "--ignore=tests/escape/test_inspected_links.py",
        "--ignore=tests/escape/test_named_paths.py",
        "--ignore=tests/escape/test_networks_used_again.py",
        "--ignore=tests/escape/test_venv_supply.py",
        # These attack the host's reader of output, its choice of programs, and terminals.
        "--ignore=tests/escape/test_held_output.py",
        "--ignore=tests/escape/test_host_programs.py",
        "--ignore=tests/escape/test_terminal.py",
    ),
    # The same ids in a container, which masks /proc and has no delegated control group. One backend
    # in each kind of container: tests/environments/test_matrix.py opens both in each.
    "pod-user": (
        *("--only-way", "userns"),
        "tests/contract/test_basics.py",
        "tests/escape/test_filesystem.py",
        "tests/escape/test_processes.py",
        "tests/escape/test_ids_stay.py",
        "tests/escape/test_shared_root_id.py",
    ),
    "pod-user-rest": (
        *("--only-way", "userns"),
        "tests/contract/test_lifecycle.py",
        "tests/escape/test_read_only_below_writable.py",
        "tests/escape/test_shown_read_only.py",
        "tests/escape/test_downgrade.py",
        "tests/escape/test_moved_root.py",
        "tests/escape/test_one_root.py",
        "tests/escape/test_environment.py",
        "tests/escape/test_lifecycle.py",
        "tests/posture",
        "tests/escape/test_exhaustion.py",
        "tests/escape/test_memory_watch.py",
        "tests/escape/test_network.py",
        "tests/escape/test_process_budgets.py",
    ),
    # Root with a container's default capabilities differs in who it becomes inside, and so in whose
    # files it reaches.
    "pod-default-caps": (
        *("--only-way", "bubblewrap"),
        "tests/contract/test_basics.py",
        "tests/contract/test_lifecycle.py",
        "tests/escape/test_filesystem.py",
        "tests/escape/test_ids_stay.py",
        "tests/escape/test_shared_root_id.py",
        "tests/escape/test_read_only_below_writable.py",
        "tests/escape/test_shown_read_only.py",
        "tests/escape/test_downgrade.py",
        "tests/escape/test_one_root.py",
        "tests/posture",
    ),
}
# Tests marked slow put load on this machine rather than on the place, so once is enough.
# A server's engine is the one that is tested here; the wire to it is the same everywhere. So are a
# process that nothing isolates, and the synchronous face, which is a thread of the host.
# tests/confined attacks landlock as root and as an ordinary user.
NOT_HERE = "not remote and not landlock"
OPTIONS = (
    *("-q", "-ra", "-p", "no:cacheprovider"),
    *("-k", NOT_HERE, "-m", "not slow and not bare and not sync_face"),
)
# A machine needs a /proc of its own, which a container that masks /proc rules out: it is refused.
NO_MACHINE = ("-k", f"{NOT_HERE} and not machine")
MASKED = ("pod-user", "pod-default-caps")
# The places run beside each other and beside the other tests, so each has one worker.
BESIDE = ("-n", "1") if not EVERYTHING else ("-n", "2")
# Root without any capability may map no id into a namespace, so nothing can be opened there.
REFUSING = "pod-root"
SOME_FAILED = 1
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)")

OPENING = """\
import asyncio, json
from union import sandbox as sb

async def main():
    try:
        async with sb.on_device.session(backend="userns") as sbx:
            found = {"opened": (await sbx.exec("echo inside")).stdout}
    except sb.BackendUnavailableError as error:
        found = {"message": str(error), "hint": error.hint, "code": error.code}
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    """Install once for all places."""
    lacking = missing("unprivileged")
    if lacking is not None:
        pytest.skip(lacking)
    with staged_suite() as staged:
        yield staged


def counts(output: str) -> dict[str, int]:
    """Read pytest's last line."""
    lines = output.strip().splitlines()
    return {word: int(number) for number, word in COUNT.findall(lines[-1] if lines else "")}


def _require(name: str) -> None:
    lacking = missing(name)
    if lacking is not None:
        pytest.skip(lacking)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, suite: Suite) -> Iterator[dict[str, Future[Outcome]]]:
    """Run the suite in all places at once, for those that this machine can make.

    Only what this run has selected is started.
    """
    selected = {
        item.callspec.params["part"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_suite_passes_in.__name__
    }
    parts = [part for part in CHOSEN if part in selected and missing(_place_of(part)) is None]
    with ExitStack() as stack:
        # The parts of one place follow each other: attacks use up what the kernel counts by user.
        pools = {
            place: stack.enter_context(ThreadPoolExecutor(1))
            for place in sorted(set(map(_place_of, parts)))
        }
        yield {
            part: pools[_place_of(part)].submit(_run_in, part, suite, _arguments(part))
            for part in parts
        }


def _place_of(part: str) -> str:
    return part.removesuffix(REST)


def _arguments(part: str) -> list[str]:
    """Return what to run; with EVERYWHERE=1, everything in the last part of each place."""
    is_last = part + REST not in CHOSEN
    return [*BESIDE, *(SUITES if EVERYTHING and is_last else CHOSEN[part])]


@pytest.mark.spec("B1", "C1", "G2")
@pytest.mark.timeout(LIMIT_S + BUILD_LIMIT_S)
@pytest.mark.parametrize("part", CHOSEN)
def test_suite_passes_in(
    part: str,
    suite: Suite,
    runs: dict[str, Future[Outcome]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 0, something passed, and nothing of it outlives the run."""
    _require(_place_of(part))
    done = runs[part].result()
    found = counts(done.stdout)
    with capsys.disabled():
        sys.stdout.write(f"\n  {part}: {found}\n")
    assert found.get("passed", 0) > 0, _summary(part, done)
    assert done.left_behind == 0, _summary(part, done)
    flaky: list[str] = []
    if done.returncode == SOME_FAILED:
        # Once more, alone, to tell a flaky test from one that does not hold in this place.
        failed = set(FAILED.findall(done.stdout))
        again = _run_in(part, suite, sorted(failed))
        flaky = sorted(failed - set(FAILED.findall(again.stdout)))
    lines = [f"flaky: {part}: {test}: failed beside others, passed alone" for test in flaky]
    assert done.returncode == 0, "\n".join((*lines, _summary(part, done)))


def test_every_place_that_opens_sessions_runs_the_suite() -> None:
    assert {_place_of(part) for part in CHOSEN} == set(NAMES) - {REFUSING}


def _summary(part: str, done: Outcome) -> str:
    return f"{part}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def _run_in(part: str, suite: Suite, arguments: list[str]) -> Outcome:
    name = _place_of(part)
    options = (*OPTIONS, *(NO_MACHINE if name in MASKED else ()))
    command = [suite.python, "-m", "pytest", *options, *arguments]
    with open_place(name, readable=suite.readable) as place:
        try:
            return place.run(command, env=suite.environment(), cwd=suite.root, timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired as expired:
            found = f"{expired.output!s}\n{expired.stderr!s}"
            pytest.fail(f"{name}: no end after {LIMIT_S:g} s\n{found}")


def _opened_in(name: str, suite: Suite) -> dict[str, str]:
    _require(name)
    with open_place(name, readable=suite.readable) as place:
        done = place.run([suite.python, "-c", OPENING], env=suite.environment(), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert done.left_behind == 0
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.spec("G1")
@pytest.mark.timeout(60 + BUILD_LIMIT_S)
def test_where_no_id_can_be_mapped_the_error_has_cause_and_remedy(suite: Suite) -> None:
    """With root that has the capability as the control."""
    found = _opened_in(REFUSING, suite)
    assert "CAP_SETFCAP" in found["message"]
    assert found["hint"]
    assert found["code"]
    assert _opened_in("pod-default-caps", suite) == {"opened": "inside\n"}
