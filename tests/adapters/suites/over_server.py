"""Each adapter over a server: the same classes with ``endpoint=``."""

import os

import pytest
from served import TOKEN, sandbox_server

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
MODULE = os.environ["ADAPTER_MODULE"]


@pytest.fixture(scope="module")
def options():
    with sandbox_server(BACKEND, token=TOKEN) as (endpoint, _):
        yield {"endpoint": endpoint, "token": TOKEN}


async def pydantic_ai(options):
    from union.sandbox.adapters.pydantic_ai import UnionSandbox, UnionSandboxBackend

    made = UnionSandboxBackend(**options)
    result = await made.run("pwd", shell=True)
    await UnionSandbox().destroy(made.ref)
    return result.stdout


async def deepagents(options):
    from union.sandbox.adapters.deepagents import UnionSandbox

    with UnionSandbox(**options) as made:
        assert made.upload_files([("/workspace/x", b"1")])[0].error is None
        assert made.download_files(["/workspace/x"])[0].content == b"1"
        return made.execute("pwd").output


async def inspect_ai(options):
    from union.sandbox.adapters.inspect_ai import UnionSandboxConfig, UnionSandboxEnvironment

    config = UnionSandboxConfig(**options)
    assert TOKEN not in config.model_dump_json() + repr(config), "a log must not contain the token"
    found = await UnionSandboxEnvironment.sample_init("task", config, {})
    result = await found["default"].exec(["pwd"])
    await UnionSandboxEnvironment.sample_cleanup("task", config, found, False)
    return result.stdout


async def smolagents(options):
    from union.sandbox.adapters.smolagents import UnionExecutor

    made = UnionExecutor(**options)
    made.run_code_raise_errors("import os; where = os.getcwd()")
    output = made.run_code_raise_errors("print(where)").logs
    made.cleanup()
    return output


async def anthropic(options):
    from union.sandbox.adapters.anthropic import agent_toolset

    tools = {tool.name: tool for tool in agent_toolset(**options)}
    output = await tools["bash"].call({"command": "pwd"})
    await tools["bash"].close()
    return output


async def strands(options):
    from union.sandbox.adapters.strands import UnionSandbox

    made = UnionSandbox(**options)
    result = await made.execute("pwd")
    made.close()
    return result.stdout


async def mini_swe_agent(options):
    from union.sandbox.adapters.mini_swe_agent import UnionEnvironment

    made = UnionEnvironment(**options)
    output = made.execute({"command": "pwd"})["output"]
    assert TOKEN not in str(made.serialize()), "a trajectory must not contain the token"
    assert TOKEN not in str(made.get_template_vars())
    made.cleanup()
    return output


async def e2b(options):
    from union.sandbox.adapters.e2b import Sandbox

    with Sandbox.create(**options) as made:
        made.files.write("x", "1")
        assert made.files.read("x") == "1"
        return made.commands.run("pwd").stdout.replace("/home/user", "/workspace")


@pytest.mark.asyncio
async def test_over_a_server(options):
    output = await globals()[MODULE](options)
    assert output.strip() == "/workspace"
