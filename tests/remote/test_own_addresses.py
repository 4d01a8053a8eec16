"""The server cannot be reached at addresses that the host gains after a session was opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ISOLATED

ROOT = Path(__file__).parents[2]
NEW = "198.51.100.7"


@pytest.mark.threat(162)
@pytest.mark.spec("I1", "F2")
@pytest.mark.needs_root
@pytest.mark.parametrize("backend", ISOLATED)
def test_current_local_addresses_of_the_host_are_denied(backend: str) -> None:
    """The positive control is another server in the same namespace, which is reached."""
    if os.geteuid() != 0:
        pytest.skip("only root may give the host further addresses, in a network namespace")
    found = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.remote.own_addresses_child", backend],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout.splitlines()[-1])
    for when in ("before", "after"):
        own, other = seen[f"{when} own"], seen[f"{when} other"]
        assert 200 not in own.values(), own
        reached = {host for host, status in other.items() if status == 200}
        missing = {NEW} if when == "before" else set()
        assert reached == set(own) - missing
    assert seen["rules"] == ["own-server"]
