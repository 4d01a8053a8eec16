"""The environment and the code executor of Google ADK."""

import asyncio
import os
from pathlib import Path

import pytest
from google.adk.code_executors.code_execution_utils import CodeExecutionInput, File
from served import sandbox_server

from union.sandbox.adapters.google_adk import UnionCodeExecutor, UnionEnvironment

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture
async def environment():
    made = UnionEnvironment(backend=BACKEND)
    await made.initialize()
    yield made
    await made.close()


@pytest.fixture
def executor():
    made = UnionCodeExecutor(backend=BACKEND, timeout_seconds=20)
    yield made
    made.close()


def run(executor, code, **more):
    return executor.execute_code(None, CodeExecutionInput(code=code, **more))


async def test_commands(environment):
    assert environment.working_dir == Path("/workspace")
    found = await environment.execute("echo out; echo err >&2; exit 3")
    assert (found.exit_code, found.stdout, found.stderr) == (3, "out\n", "err\n")
    late = await environment.execute("echo begun; sleep 60", timeout=1)
    assert late.timed_out
    assert late.stdout == "begun\n"


async def test_files(environment, tmp_path):
    await environment.write_file(Path("a/b.txt"), "text")
    await environment.write_file(Path("/tmp/c"), b"\xff")
    assert await environment.read_file(Path("/workspace/a/b.txt")) == b"text"
    assert await environment.read_file(Path("/tmp/c")) == b"\xff"
    with pytest.raises(FileNotFoundError):
        await environment.read_file(Path("missing"))
    outside = tmp_path / "outside"
    outside.write_text("secret")
    await environment.execute(f"ln -s {outside} link")
    with pytest.raises(OSError):
        await environment.read_file(Path("link"))


async def test_life_cycle():
    made = UnionEnvironment(backend=BACKEND)
    with pytest.raises(RuntimeError):
        _ = made.working_dir
    await made.initialize()
    await made.initialize()
    assert made.is_initialized
    await made.close()
    await made.close()
    assert not made.is_initialized


def test_code_keeps_its_variables_by_id(executor):
    assert executor.stateful
    assert run(executor, "x = 6", execution_id="one").stderr == ""
    assert run(executor, "print(x * 7)", execution_id="one").stdout == "42\n"
    other = run(executor, "print(x)", execution_id="two")
    assert "NameError" in other.stderr


def test_files_go_in_and_come_out(executor):
    given = [File(name="in.csv", content=b"1,2\n", mime_type="text/csv")]
    found = run(executor, "open('out.csv','w').write(open('in.csv').read() * 2)", input_files=given)
    assert [(f.name, f.content, f.mime_type) for f in found.output_files] == [
        ("out.csv", b"1,2\n1,2\n", "text/csv")
    ]


def test_a_timeout_is_reported():
    made = UnionCodeExecutor(backend=BACKEND, timeout_seconds=1)
    assert "timeout" in run(made, "while True: pass").stderr
    made.close()


def test_it_works_inside_a_running_loop(executor):
    async def main():
        return run(executor, "print(1)").stdout

    assert asyncio.run(main()) == "1\n"


async def test_over_a_server():
    with sandbox_server(BACKEND) as (endpoint, _):
        made = UnionEnvironment(endpoint=endpoint)
        await made.initialize()
        assert (await made.execute("pwd")).stdout == "/workspace\n"
        await made.close()
