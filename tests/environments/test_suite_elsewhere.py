"""The project's own suite passes as a plain user and in an ordinary pod."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.environments.places import LIMIT_S, NAMES, missing, open_place
from tests.environments.suite import BUILD_LIMIT_S, Suite, staged_suite

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITES = ("tests/contract", "tests/escape")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)")


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


@pytest.mark.timeout(LIMIT_S + BUILD_LIMIT_S)
@pytest.mark.parametrize("name", NAMES)
def test_suite_passes_in(name: str, suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, something passed, and nothing of it outlives the run."""
    lacking = missing(name)
    if lacking is not None:
        pytest.skip(lacking)
    command = [suite.python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *SUITES]
    with open_place(name, readable=suite.readable) as place:
        try:
            done = place.run(command, env=suite.environment(), cwd=suite.root, timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired as expired:
            told = f"{expired.output!s}\n{expired.stderr!s}"
            pytest.fail(f"{name}: no end after {LIMIT_S:g} s\n{told}")
    found = counts(done.stdout)
    with capsys.disabled():
        sys.stdout.write(f"\n  {name}: {found}\n")
    told = f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    assert found.get("passed", 0) > 0, told
    assert done.left_behind == 0, told
