"""Missing system packages are named before the setup, with the command that installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PREFLIGHT = Path(__file__).resolve().parents[2] / "scripts" / "preflight"
TOOLS = ("cat", "id", "mktemp", "rm", "sh", "uname")
APT = "apt-get install --yes --no-install-recommends"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with nothing on it but what the script itself uses."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    return tmp_path


def program(place: Path, name: str, text: str) -> None:
    (place / name).write_text(f"#!/bin/sh\n{text}\n")
    (place / name).chmod(0o755)


def run(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(PREFLIGHT)],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": str(path), **env},
    )


def test_with_everything_there_it_prints_the_python_alone(path: Path):
    program(path, "python3", "exit 0")
    program(path, "gcc", "exit 0")
    done = run(path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}/python3\n", "")


def test_everything_that_is_missing_is_named_at_once(path: Path):
    program(path, "python3", "exit 1")  # no ensurepip, or too old
    done = run(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{APT} python3 python3-venv gcc libc6-dev" in done.stderr
    assert "make PYTHON=" in done.stderr
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert f"{sudo}apt-get update && {sudo}apt-get install" in done.stderr


def test_without_a_compiler_it_goes_on_and_names_one(path: Path):
    program(path, "python3", "exit 0")
    program(path, "cc", "exit 1")  # without the C library's archive
    done = run(path)
    assert (done.returncode, done.stdout) == (0, f"{path}/python3\n")
    assert f"{APT} gcc libc6-dev" in done.stderr
    assert "ziglang" in done.stderr
    assert run(path, UNION_SANDBOX_SKIP_NATIVE="1").stderr == ""


def test_a_python_that_is_named_is_the_only_candidate(path: Path):
    program(path, "python3", "exit 0")
    program(path, "gcc", "exit 0")
    program(path, "other", "exit 0")
    assert run(path, PYTHON=str(path / "other")).stdout == f"{path}/other\n"
    done = run(path, PYTHON="/no/such/python")
    assert (done.returncode, done.stdout) == (1, "")
    assert "PYTHON=/no/such/python is not a Python 3.11 or newer" in done.stderr


def test_every_source_of_the_launcher_is_a_reason_to_compile_it_again() -> None:
    root = PREFLIGHT.parents[1]
    listed = subprocess.run(
        ["make", "--print-data-base", "--question", "help"],
        check=False,
        capture_output=True,
        text=True,
        cwd=root,
        timeout=60,
    )
    rule = next(line for line in listed.stdout.splitlines() if line.startswith(".venv/.package:"))
    sources = {str(path.relative_to(root)) for path in (root / "native").rglob("*.[ch]")}
    assert sources - set(rule.split()) == set()
