"""`make test-gvisor`: the contract, escape, posture and network suites inside gVisor.

It takes about half an hour. `make test-all` has `test_gvisor.py`, which is shorter.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from tests.environments import gvisor_counts, pod, runsc
from tests.environments.places import missing, open_pod
from tests.environments.suite import BUILD_LIMIT_S, Suite, staged_suite
from tests.environments.test_suite_elsewhere import counts

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 1500.0
PART = "SANDBOX_TEST_PART"
"""The variable that names the tests of a part, separated by spaces; else all suites are run."""
RECORD = "RECORD"
"""The variable that, with 1, has the counts kept and written to the page."""
# -r lists all results, and the exceptions with their causes. Only userns works there; the wire to a
# server is the same everywhere. Named paths are not on a tmpfs, where some cannot be shown
# read-only.
OPTIONS = (
    *("-q", "-rpfExXs", "-p", "no:cacheprovider", "-k", "not remote", "--only-way", "userns"),
    *(f"--ignore={module}" for module in sorted(gvisor_counts.NO_TESTS)),
)
PLACES = {
    "uid 1000": pod.Pod(uid=1000),
    "root": pod.Pod(uid=0, capabilities=pod.DEFAULT_CAPABILITIES),
}
assert tuple(PLACES) == gvisor_counts.PLACES


def inside(shape: pod.Pod) -> pod.Pod:
    """Return the same container in gVisor; skip where there is no runsc for it."""
    if (reason := missing("pod-user") or runsc.lacking()) is not None:
        pytest.skip(reason)
    import dataclasses

    return dataclasses.replace(shape, runtime=runsc.command())


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    """Install once for all places."""
    if (reason := missing("pod-user")) is not None:
        pytest.skip(reason)
    with staged_suite() as staged:
        yield staged


@pytest.mark.timeout(LIMIT_S + BUILD_LIMIT_S)
@pytest.mark.parametrize("who", PLACES)
def test_suites_pass_in_gvisor(who: str, suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    command = [suite.python, "-m", "pytest", *OPTIONS, "-m", "not slow and not bare", "-n", "2"]
    command += [
        f"--basetemp={pod.HOME}/pytest",
        *(os.environ.get(PART, "").split() or gvisor_counts.SUITES),
    ]
    with open_pod("gvisor", inside(PLACES[who]), readable=suite.readable) as place:
        done = place.run(command, env=suite.environment(), cwd=suite.root, timeout_s=LIMIT_S)
    exceptions = [line for line in done.stdout.splitlines() if line.startswith(("XFAIL", "XPASS"))]
    if os.environ.get(RECORD) == "1":
        gvisor_counts.record(who, gvisor_counts.by_module(done.stdout))
    with capsys.disabled():
        sys.stdout.write(
            "\n".join(("", *exceptions, f"  gVisor, {who}: {counts(done.stdout)}", ""))
        )
    assert counts(done.stdout), done.stderr
    assert done.returncode == 0, done.stdout
