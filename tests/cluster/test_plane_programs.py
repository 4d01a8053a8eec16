"""The programs of the deployment page, run on the stand-in; and the commands beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import flyte
import pytest
from tests.plane.client import PROJECT_DIR
from tests.plane.sandboxes import in_task, live_runs, sandbox_plane, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(180), pytest.mark.spec("I6", "I7")]

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane(secrets={"hf/HF_TOKEN": "a token"}) as plane:
        import deployment_page

        flyte.deploy(deployment_page.ml_sandbox_env)
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(plane: Plane) -> Iterator[None]:
    yield
    settled(plane)


# `main` is run from the command line, below.
@pytest.mark.parametrize("name", ["run_userns", "run_bwrap", "serve_user_session"])
async def test_a_documented_program_runs(plane: Plane, name: str):
    import deployment_page

    inputs = {"user_id": "alice"} if name == "serve_user_session" else {}
    assert (await in_task(getattr(deployment_page, name), **inputs)).startswith("Linux ")


async def test_a_custom_environment_has_its_variables_and_secrets(plane: Plane):
    import deployment_page

    assert await in_task(deployment_page.run_inference) == "42\n"
    made = [run for run in plane.state.runs.values() if "ml-sandbox" in str(run.root.details.task)]
    environment = made[-1].root.pods[-1].environment
    assert environment["HF_HOME"] == "/tmp/hf"
    assert environment["HF_HF_TOKEN"] == "a token"


async def test_a_parent_passes_its_session_to_children(plane: Plane):
    import deployment_page

    assert await in_task(deployment_page.parent) == [
        {"script": "echo one", "stdout": "one\n", "returncode": 0},
        {"script": "echo two", "stdout": "two\n", "returncode": 0},
    ]


def command(plane: Plane, *words: str) -> str:
    """Run a command of the SDK, or of ours, with a configuration file."""
    environment = {**os.environ, "FLYTECTL_CONFIG": str(plane.config_file())}
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        check=False,
        capture_output=True,
        text=True,
        cwd=PROJECT_DIR,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_defaults_are_deployed_by_one_command(plane: Plane):
    before = len(plane.state.tasks)
    command(plane, "unionai-sandbox-deploy", "--version", "by-command")
    fresh = {(t.task_id.name, t.task_id.version) for t in plane.state.tasks[before:]}
    assert fresh == {
        ("union-sandbox.sandbox_server", "by-command"),
        ("union-sandbox-bwrap.sandbox_server", "by-command"),
    }


def test_the_documented_program_runs_from_the_command_line(plane: Plane):
    before = set(plane.state.runs)
    command(plane, "flyte", "run", "--follow", "deployment_page.py", "main")
    fresh = [plane.state.runs[key] for key in plane.state.runs if key not in before]
    assert {run.root.phases[-1] for run in fresh} <= {"SUCCEEDED", "ABORTED"}
    assert len(fresh) == 2
    assert not live_runs(plane)
