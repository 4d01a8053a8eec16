"""File tools of each adapter on a work dir of this machine in which sandboxed code has set traps.

A trap is a name that leads a program on the host to a file outside: a link, a link in the middle of
a path, "..", and a name that is a file at one moment and a link at the next. The control opens the
same names on the host and finds the file, so the traps work.
"""

import contextlib
import os
import pathlib

import pytest

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
MODULE = os.environ["ADAPTER_MODULE"]
SECRET = "a secret of the host"
WRITTEN = "written through a trap"
SWAPS = 30


@contextlib.asynccontextmanager
async def pydantic_ai(options):
    from pydantic_ai.workspaces import Workspace

    from union.sandbox.adapters.pydantic_ai import UnionSandbox, UnionSandboxBackend

    made = UnionSandboxBackend(**options)
    files, top = Workspace(made), await made.working_dir()

    async def run(text):
        return (await made.run(text, shell=True)).stdout

    async def read(path):
        return await files.read_bytes(f"{top}/{path}")

    async def write(path, text):
        await files.write_bytes(f"{top}/{path}", text.encode())

    yield run, read, write
    await UnionSandbox().destroy(made.ref)


@contextlib.asynccontextmanager
async def deepagents(options):
    from union.sandbox.adapters.deepagents import UnionSandbox

    with UnionSandbox(**options) as made:

        async def run(text):
            return made.execute(text).output

        async def read(path):
            by_tool = made.read(f"{made.work_dir}/{path}")
            (found,) = made.download_files([f"{made.work_dir}/{path}"])
            return f"{found.content} {by_tool}"

        async def write(path, text):
            made.write(f"{made.work_dir}/{path}", text)
            made.upload_files([(f"{made.work_dir}/{path}", text.encode())])

        yield run, read, write


@contextlib.asynccontextmanager
async def inspect_ai(options):
    from union.sandbox.adapters.inspect_ai import UnionSandboxConfig, UnionSandboxEnvironment

    config = UnionSandboxConfig(**options)
    found = await UnionSandboxEnvironment.sample_init("task", config, {})
    made = found["default"]

    async def run(text):
        return (await made.exec(["sh", "-c", text])).stdout

    yield run, made.read_file, made.write_file
    await UnionSandboxEnvironment.sample_cleanup("task", config, found, False)


@contextlib.asynccontextmanager
async def anthropic(options):
    from union.sandbox.adapters.anthropic import agent_toolset

    tools = {tool.name: tool for tool in agent_toolset(**options)}

    async def run(text):
        return await tools["bash"].call({"command": text})

    async def read(path):
        found = await tools["grep"].call({"pattern": ".", "path": path})
        return f"{found} {await tools['read'].call({'file_path': path})}"

    async def write(path, text):
        await tools["write"].call({"file_path": path, "content": text})

    yield run, read, write
    await tools["bash"].close()


@contextlib.asynccontextmanager
async def strands(options):
    from union.sandbox.adapters.strands import UnionSandbox

    made = UnionSandbox(**options)

    async def run(text):
        return (await made.execute(text)).stdout

    async def write(path, text):
        await made.write_file(path, text.encode())

    yield run, made.read_file, write
    made.close()


@contextlib.asynccontextmanager
async def e2b(options):
    from union.sandbox.adapters.e2b import AsyncSandbox

    made = await AsyncSandbox.create(**options)
    base = (await made.commands.run("pwd")).stdout.strip()

    async def run(text):
        return (await made.commands.run(text)).stdout

    async def read(path):
        return await made.files.read(f"{base}/{path}")

    async def write(path, text):
        await made.files.write(f"{base}/{path}", text)

    yield run, read, write
    await made.kill()


@contextlib.asynccontextmanager
async def google_adk(options):
    from union.sandbox.adapters.google_adk import UnionEnvironment

    made = UnionEnvironment(**options)
    await made.initialize()

    async def run(text):
        return (await made.execute(text)).stdout

    async def read(path):
        return await made.read_file(pathlib.Path(path))

    async def write(path, text):
        await made.write_file(pathlib.Path(path), text)

    yield run, read, write
    await made.close()


@contextlib.asynccontextmanager
async def crewai(options):
    from union.sandbox.adapters.crewai import sandbox_tools

    shell, _, files = sandbox_tools(**options)

    async def run(text):
        return str(shell.run(command=text))

    async def read(path):
        found = files.run(action="read", path=path)
        return found.get("content", "")

    async def write(path, text):
        files.run(action="write", path=path, content=text)

    yield run, read, write
    shell.close()


@contextlib.asynccontextmanager
async def mcp(options):
    from mcp_tools import call, connect

    async with connect(is_new=True, **options) as client:

        async def run(text):
            done = await call(client, "run_command", command=text)
            return done["structuredContent"]["stdout"]

        async def read(path):
            return str(await call(client, "read_file", path=path))

        async def write(path, text):
            await call(client, "write_file", path=path, content=text)

        yield run, read, write


@pytest.mark.asyncio
async def test_no_trap_leads_a_file_tool_to_the_host(tmp_path):
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    traps = ["link", "folder/secret", "../outside/secret", "a/../../outside/secret"]
    options = {"backend": BACKEND, "host_work_dir": str(work)}
    async with globals()[MODULE](options) as (run, read, write):
        await run(f"mkdir a; ln -s {outside}/secret link; ln -s {outside} folder")
        await write("plain", "plain text")
        assert "plain text" in _text(await read("plain"))
        assert (work / "plain").read_text() == "plain text"
        for trap in traps:
            assert (work / trap).read_text() == SECRET  # the control: the host would follow it
            assert SECRET not in await _attempt(read, trap)
            await _attempt(write, trap, WRITTEN)
            assert (outside / "secret").read_text() == SECRET
        await run(
            "(while :; do rm -f race; echo x > race; rm -f race; ln -s "
            f"{outside}/secret race; done) >/dev/null 2>&1 & echo $! > racer"
        )
        for _ in range(SWAPS):
            assert SECRET not in await _attempt(read, "race")
            await _attempt(write, "race", WRITTEN)
        await run("kill $(cat racer)")
    assert (outside / "secret").read_text() == SECRET
    assert sorted(os.listdir(outside)) == ["secret"]


def _text(found):
    return found.decode() if isinstance(found, bytes) else str(found)


async def _attempt(tool, *arguments):
    """Return what a tool returns; a refusal is an acceptable end, and its message is searched."""
    try:
        return _text(await tool(*arguments))
    except Exception as exc:  # noqa: BLE001 - each framework has its own errors
        return f"{exc!r}"
