"""The tools for CrewAI."""

import os

import pytest
from served import sandbox_server

from union.sandbox.adapters.crewai import (
    UnionExecTool,
    UnionFileTool,
    UnionPythonTool,
    UnionSandbox,
    sandbox_tools,
)
from union.sandbox.errors import SandboxUsageError

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture(scope="module")
def tools():
    made = sandbox_tools(backend=BACKEND)
    yield made
    made[0].close()


def test_a_command_is_a_result(tools):
    found = tools[0].run(command="echo out; echo err >&2; exit 3")
    assert found == {
        "exit_code": 3, "stdout": "out\n", "stderr": "err\n", "truncated": False, "error": None,
    }  # fmt: skip
    assert tools[0].run(command="sleep 60", timeout=0.5)["error"] == "timeout"
    assert "error" in tools[0].run(command="true", cwd="/nowhere")


def test_python_keeps_its_variables(tools):
    assert tools[1].run(code="x = 6")["error"] is None
    assert tools[1].run(code="x * 7")["text"] == "42"
    assert tools[1].run(code="1 / 0")["error"].startswith("ZeroDivisionError")


def test_the_tools_share_one_sandbox(tools):
    tools[2].run(action="write", path="data/n.txt", content="one\n")
    tools[2].run(action="append", path="data/n.txt", content="two\n")
    assert tools[0].run(command="cat data/n.txt")["stdout"] == "one\ntwo\n"
    assert tools[1].run(code="open('data/n.txt').read()")["text"] == "'one\\ntwo\\n'"


def test_file_actions(tools):
    files = tools[2]
    files.run(action="mkdir", path="folder/sub")
    files.run(action="write", path="folder/b", content="/wA=", binary=True)
    assert files.run(action="read", path="folder/b")["encoding"] == "base64"
    listed = files.run(action="list", path="folder")["entries"]
    assert [(e["path"], e["kind"]) for e in listed] == [("folder/b", "file"), ("folder/sub", "dir")]
    assert files.run(action="exists", path="folder/b")["exists"] is True
    files.run(action="delete", path="folder")
    assert files.run(action="exists", path="folder/b")["exists"] is False
    assert files.run(action="read", path="missing")["error"].startswith("FileNotFoundError")


def test_a_link_of_the_sandbox_leads_nowhere_on_the_host(tools, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("secret")
    tools[0].run(command=f"ln -sf {outside} link")
    assert "error" in tools[2].run(action="read", path="link")
    assert "error" in tools[2].run(action="write", path="link", content="changed")
    assert outside.read_text() == "secret"


def test_options_are_not_given_twice():
    with pytest.raises(SandboxUsageError):
        UnionExecTool(sandbox=UnionSandbox(backend=BACKEND), backend=BACKEND)
    made = UnionPythonTool(backend=BACKEND, name="Other name")
    assert made.name == "Other name"
    assert made.run(code="1 + 1")["text"] == "2"
    made.close()


def test_over_a_server():
    with sandbox_server(BACKEND) as (endpoint, _):
        made = UnionFileTool(endpoint=endpoint)
        made.run(action="write", path="x", content="1")
        assert made.run(action="read", path="/workspace/x")["content"] == "1"
        made.close()
