"""Checkpoints on a full disk: each call fails as a whole, says why, and can be repeated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ISOLATED

ROOT = Path(__file__).resolve().parents[2]
SIZE = "size=16m,nr_inodes=200"
CALLS = ("first checkpoint", "checkpoint", "rollback", "fork")


def on_a_small_disk(place: Path, backend: str) -> list[dict[str, Any]]:
    """Run the program in a mount namespace of its own, with a small tmpfs; return its reports."""
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if unshare is None or setpriv is None:
        pytest.skip("needs unshare and setpriv: apt-get install util-linux")
    # An ordinary user mounts in a user namespace with its own id, and keeps no capability.
    namespaces = ["--mount"]
    if os.geteuid() != 0:
        namespaces += ["--user", "--map-current-user", "--keep-caps"]
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    program = [sys.executable, "-m", "tests.checkpoints.full_disk", str(place), backend]
    if os.geteuid() != 0:
        program = [setpriv, "--ambient-caps=-all", "--inh-caps=-all", *program]
    ran = subprocess.run(
        [unshare, *namespaces, "sh", "-c", script, "sh", SIZE, str(place), *program],
        capture_output=True,
        check=False,
        timeout=250,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.spec("L1", "L2")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ISOLATED)
def test_calls_on_a_full_disk(backend: str, outside_tmp: Path) -> None:
    reports = on_a_small_disk(outside_tmp, backend)
    for call in CALLS:
        *failed, last = [one for one in reports if one["call"] == call]
        # The disk was full at each directory that the call makes, until it had room for all.
        assert len(failed) >= 3, call
        assert last["error"] == ""
        for one in failed:
            assert (one["error"], one["code"]) == ("SandboxExecutionError", "disk-full"), one
            assert f"free space on the disk of {outside_tmp}" in one["hint"]
        for one in (*failed, last):
            # The session goes on, and is no copy from now on because its disk was full once.
            assert (one["output"], one["written"], one["kind"]) == ("1", "2\n", "overlay"), one
        if call == "first checkpoint":
            assert all(one["layers"] == one["left"] == [] for one in failed)
        else:
            assert all(one["is_same"] and one["files"] == ["a", "b"] for one in failed), failed
            assert all(one["restored"] == ["a"] for one in (*failed, last))
    found = {one["call"]: one for one in reports}
    assert (found["put_bytes"]["error"], found["put_bytes"]["code"]) == (
        "SandboxFileError",
        "disk-full",
    )
    assert found["put_bytes"]["hint"]
    assert (found["copy"]["code"], found["copy"]["is_same"]) == ("disk-full", True)
    assert found["export"]["code"] == "disk-full"
    assert found["exec"]["output"] == "1"
    assert "No space left on device" in found["exec"]["stderr"]
    assert (found["copy again"]["kind"], found["copy again"]["running"]) == ("copy", True)
    assert found["restored"]["size"] == 2 * 2**20
    merges = [one for one in reports if one["call"] == "merge"]
    assert all(one["output"] == "1" and not one["is_single"] for one in merges)
    *full, last = [one for one in merges if one["room"] == 0]
    # At each directory and file that a merge makes, the disk was full; the layers stay.
    assert len(full) >= 8
    assert all(one["is_same"] and not one["is_merged"] for one in full)
    assert last["is_merged"]
    checked = [one for one in merges if one["room"] > 0]
    assert all(one["is_same"] and not one["is_merged"] for one in checked)
    assert found["merged"]["files"] == ["a", "d0", "d1", "d2", "d3"]
    # Nothing is left when the sessions are closed.
    assert [one["left"] for one in reports if one["call"] == "close"] == [[], [], []]
