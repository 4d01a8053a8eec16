"""The shell of LangChain's ``ShellToolMiddleware`` in a sandbox."""

import os

import pytest
from langchain.agents.middleware.shell_tool import ShellSession

from union.sandbox.adapters.langchain import UnionExecutionPolicy

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "mine.txt").write_text("mine\n")
    policy = UnionExecutionPolicy(backend=BACKEND)
    session = ShellSession(workspace, policy, ("/bin/bash",), {"GIVEN": "value"})
    session.start()
    yield session
    session.stop(5)


def out(shell, command):
    result = shell.execute(command, timeout=60)
    assert not result.timed_out
    return result.output.strip()


def test_commands_share_a_shell(shell):
    out(shell, "cd /tmp; x=1")
    assert out(shell, "echo $PWD $x") == "/tmp 1"


def test_variables_and_the_workspace_are_passed_on(shell):
    assert out(shell, "echo $GIVEN; cat $OLDPWD/mine.txt") == "value\nmine"


def test_an_exit_code_is_reported(shell):
    result = shell.execute("(exit 3)", timeout=60)
    assert result.exit_code == 3


def test_a_job_goes_on(shell):
    out(shell, "(until test -e /tmp/go; do sleep 0.05; done; touch /tmp/done) & true")
    assert (
        out(shell, "touch /tmp/go; until test -e /tmp/done; do sleep 0.05; done; echo yes") == "yes"
    )


def test_the_home_directory_is_not_visible(shell, tmp_path):
    (tmp_path / "secret").write_text("secret")
    assert "No such file" in out(shell, f"cat {tmp_path}/secret 2>&1; true")
