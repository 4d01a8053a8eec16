"""The sandbox protocol of AG2, and its tools."""

import os
from pathlib import PurePosixPath

import pytest
from ag2 import Agent
from ag2.events import ToolCallEvent
from ag2.testing import TestConfig
from ag2.tools import SandboxCodeTool, SandboxShellTool
from ag2.tools.sandbox import Sandbox, SandboxFactory
from served import sandbox_server

from union.sandbox.adapters.ag2 import UnionEnvironment, UnionSandbox

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture
async def sandbox():
    async with UnionSandbox(backend=BACKEND, max_output=1000) as made:
        yield made


async def test_it_has_the_protocol(sandbox):
    assert isinstance(sandbox, Sandbox)
    assert isinstance(UnionEnvironment(backend=BACKEND), SandboxFactory)
    assert sandbox.workdir == PurePosixPath("/workspace")
    assert sandbox.host_workdir is None


async def test_output_is_merged_and_codes_are_posix(sandbox):
    found = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (found.output, found.exit_code) == ("out\nerr", 3)
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec([])).exit_code == 2
    late = await sandbox.exec(["sh", "-c", "echo begun; sleep 60"], timeout=1)
    assert late.exit_code == 124
    assert late.output.startswith("begun\n")


async def test_long_output_is_cut_with_a_note(sandbox):
    found = await sandbox.exec(["sh", "-c", "seq 10000"])
    assert found.output.endswith("[truncated: showing first 1000 of 48893 chars]")


async def test_files_and_variables(sandbox):
    await sandbox.put_file(PurePosixPath("a/b.txt"), b"\xff\0")
    assert (await sandbox.exec(["wc", "-c", "a/b.txt"])).output == "2 a/b.txt"
    await sandbox.remove_file(PurePosixPath("a/b.txt"))
    await sandbox.remove_file(PurePosixPath("a/b.txt"))
    assert (await sandbox.exec(["ls", "a"])).output == ""
    assert (await sandbox.exec(["sh", "-c", "echo $X"], env={"X": "given"})).output == "given"
    for path in ("/etc/x", "../x"):
        with pytest.raises(ValueError):
            await sandbox.put_file(PurePosixPath(path), b"")


async def test_a_link_of_the_sandbox_leads_nowhere_on_the_host(sandbox, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    await sandbox.exec(["ln", "-s", str(outside), "link"])
    with pytest.raises(OSError):
        await sandbox.put_file(PurePosixPath("link"), b"changed")
    assert outside.read_text() == "untouched"


async def test_an_agent_uses_both_tools_in_one_sandbox():
    environment = UnionEnvironment(backend=BACKEND)
    model = TestConfig(
        ToolCallEvent(name="run_shell_command", arguments='{"command": "echo 6 > n"}'),
        ToolCallEvent(
            name="run_code",
            arguments='{"code": "print(int(open(\'n\').read()) * 7)", "language": "python"}',
        ),
        "done",
    )
    tools = [SandboxShellTool(environment), SandboxCodeTool(environment)]
    reply = await Agent("a", config=model, tools=tools).ask("go")
    assert reply.body == "done"
    found = [str(event) for event in await reply.history.get_events()]
    assert any("42" in text for text in found)
    await environment.aclose()


async def test_over_a_server():
    with sandbox_server(BACKEND) as (endpoint, _):
        async with UnionSandbox(endpoint=endpoint) as sandbox:
            assert (await sandbox.exec(["pwd"])).output == "/workspace"
