"""The examples for Flyte run as they say: as programs, and by `flyte run --local`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "flyte"
FLYTE = "from flyte.cli.main import main; main()"
# The output of each example, and the arguments of `flyte run` for it.
RUNS = {
    "on_device_in_a_task.py": ("hello from userns\nhello from bubblewrap\n", ["both"]),
    "remote_session.py": ("6 from a process\n", ["main"]),
    "custom_environment.py": ("hello from /tmp/sandbox-work\n", ["main"]),
    "parent_and_children.py": (
        "child 1, owner: False\nchild 2, owner: False\nchild 1\nchild 2\n",
        ["parent"],
    ),
    "detached.py": ("hello jo\n", ["serve_user_session", "--user_id", "jo"]),
}
# As programs, all of them are run; `flyte run` differs in who creates the tasks.
LOCAL_RUNS = (
    RUNS if os.environ.get("EVERYWHERE") == "1" else ["parent_and_children.py", "detached.py"]
)
MODULES = {"my_sandboxes.py", "deploy_my_sandboxes.py"}


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and check for leftovers."""
    process = subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
    )
    try:
        out, err = process.communicate(timeout=110)
    finally:
        process.kill()
    mine = f"sandbox-{process.pid}-"
    left = [name for name in os.listdir("/var/tmp") if name.startswith(mine)]
    assert left == []
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS) | MODULES


@pytest.mark.spec("I4", "I5", "I8")
@pytest.mark.parametrize("name", RUNS)
def test_as_a_program(name):
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == RUNS[name][0]
    assert "Traceback" not in done.stderr
    assert "Unclosed" not in done.stderr


@pytest.mark.spec("I8")
@pytest.mark.parametrize("name", LOCAL_RUNS)
def test_with_flyte_run_local(name):
    done = run("-c", FLYTE, "run", "--local", name, *RUNS[name][1])
    assert done.returncode == 0, done.stdout + done.stderr
    for line in RUNS[name][0].splitlines():
        assert line in done.stdout


@pytest.mark.spec("I7")
def test_flyte_deploy_finds_the_custom_environment():
    done = run(
        "-c", FLYTE, "--endpoint", "http://127.0.0.1:9", "--insecure", "deploy", "--dry-run",
        "-p", "p", "-d", "d", "deploy_my_sandboxes.py", "data_sandbox_env",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data-sandbox" in done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(set(RUNS) | MODULES))
def test_every_example_documents_how_to_run_it(name):
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert docstring
    assert name in docstring or name == "my_sandboxes.py"
