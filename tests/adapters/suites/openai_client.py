"""Own tests of the sandbox client for the OpenAI Agents SDK."""

import asyncio
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from agents import RunConfig, Runner
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError, InvalidManifestPathError, SandboxError
from agents.sandbox.manifest import SandboxPathGrant

from union.sandbox import on_device
from union.sandbox.adapters.openai_agents import UnionSandboxClient, UnionSandboxClientOptions
from union.sandbox.errors import SandboxUsageError

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
pytestmark = pytest.mark.asyncio


@pytest.fixture
def client():
    return UnionSandboxClient(backend=BACKEND)


async def test_commands_are_isolated_and_see_no_files_of_the_user(client, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("secret of the caller")
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    async with await client.create() as session:
        try:
            assert (await session.exec("cat", str(secret))).exit_code != 0
            assert b"SECRET_OF_THE_CALLER" not in (await session.exec("env")).stdout
            shown = await session.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")
            assert shown.stdout.split() == [b"lo"]
        finally:
            await client.delete(session)


async def test_a_command_cannot_leave_a_link_for_the_file_calls(client, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    async with await client.create() as session:
        await session.exec(f"ln -s {outside} link; ln -s {tmp_path} folder; ln -s /etc/passwd p")
        for path in ("link", "folder/outside", "p"):
            with pytest.raises(InvalidManifestPathError):
                await session.read(Path(path))
            with pytest.raises(InvalidManifestPathError):
                await session.write(Path(path), io.BytesIO(b"changed"))
        await client.delete(session)
    assert outside.read_text() == "untouched"


async def test_a_grant_that_does_not_exist_yet_is_not_made_through_a_link(client, tmp_path):
    data, outside = tmp_path / "data", tmp_path / "outside"
    data.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    late = (data / "a" / "out", data / "b", data / "c" / "out")
    grants = tuple(SandboxPathGrant(path=str(path)) for path in (data, *late))
    session = await client.create(manifest=Manifest(extra_path_grants=grants))
    async with session:
        made = await session.exec(f"cd {data} && ln -s {outside} a && ln -s {outside} b")
        assert made.exit_code == 0, made.stderr
        assert (data / "b" / "secret").read_text() == "secret"  # the host would follow it
        for path in (data / "a" / "out" / "file", data / "b" / "file"):
            with pytest.raises(SandboxError):
                await session.write(path, io.BytesIO(b"x"))
        assert b"secret" not in (await session.exec(f"cat {data}/b/secret")).stdout
        await session.write(data / "c" / "out" / "file", io.BytesIO(b"x"))  # the control
        await client.delete(session)
    assert os.listdir(outside) == ["secret"]
    assert (data / "c" / "out" / "file").read_bytes() == b"x"


async def test_bytes_exit_codes_and_timeouts(client):
    async with await client.create() as session:
        found = await session.exec("printf '\\377\\000'; echo err >&2; exit 7")
        assert (found.stdout, found.stderr, found.exit_code) == (b"\xff\0", b"err\n", 7)
        with pytest.raises(ExecTimeoutError):
            await session.exec("sleep 60", timeout=0.2)
        await client.delete(session)


async def test_a_workspace_that_was_made_here_is_removed_and_another_is_kept(client, tmp_path):
    session = await client.create(manifest=Manifest(entries={"a.txt": File(content=b"a")}))
    root = Path(session.state.manifest.root)
    async with session:
        assert (root / "a.txt").read_bytes() == b"a"
    await client.delete(session)
    assert not root.exists()
    kept = tmp_path / "kept"
    session = await client.create(manifest=Manifest(root=str(kept)))
    async with session:
        assert (await session.exec("echo mine > file; ls -A")).stdout == b"file\n"
    await client.delete(session)
    assert (kept / "file").read_text() == "mine\n"


async def test_a_state_contains_no_policy_and_is_resumed_from_its_snapshot(client, tmp_path):
    open_client = UnionSandboxClient(backend=BACKEND, network_mode="open")
    session = await open_client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path / "s"))
    async with session:
        await session.write(Path("note"), io.BytesIO(b"kept"))
    await open_client.delete(session)
    payload = open_client.serialize_session_state(session.state)
    assert "open" not in json.dumps(payload)
    resumed = await client.resume(client.deserialize_session_state(dict(payload)))
    async with resumed:
        assert (await resumed.read(Path("note"))).read() == b"kept"
        shown = await resumed.exec("cat /proc/net/dev | wc -l")
        assert shown.stdout.strip() == b"3"
    await client.delete(resumed)


async def test_grants_are_enforced_by_the_sandbox_too(client, tmp_path):
    shown, given = tmp_path / "shown", tmp_path / "given"
    for folder in (shown, given):
        folder.mkdir()
        (folder / "file").write_text("first")
    grants = (SandboxPathGrant(path=str(shown), read_only=True), SandboxPathGrant(path=str(given)))
    manifest = Manifest(root=str(tmp_path / "w"), extra_path_grants=grants)
    async with await client.create(manifest=manifest) as session:
        assert (await session.exec(f"cat {shown}/file")).stdout == b"first"
        assert (await session.exec(f"echo x > {shown}/file")).exit_code != 0
        assert (await session.exec(f"echo second > {given}/file")).exit_code == 0
        await client.delete(session)
    assert (shown / "file").read_text() == "first"
    assert (given / "file").read_text() == "second\n"


async def test_a_session_of_the_caller_is_used_and_left_open():
    async with on_device.session(backend=BACKEND, persist="machine") as own:
        client = UnionSandboxClient(session=own)
        async with await client.create() as session:
            assert (await session.exec("pwd")).stdout.decode().strip() == own.work_dir
            await session.write(Path("x"), io.BytesIO(b"1"))
            assert [Path(e.path).name for e in await session.ls(".")] == ["x"]
        await client.delete(session)
        assert (await own.exec("cat x")).stdout == "1"


async def test_the_workspace_is_not_given_twice():
    with pytest.raises(SandboxUsageError):
        UnionSandboxClient(host_work_dir="/tmp")
    assert UnionSandboxClientOptions().type == "union"


async def test_an_agent_runs_in_it(client):
    from tests.sandbox.integration_tests.test_model import TestModel

    model = TestModel()
    model.queue_function_call("exec_command", {"cmd": "echo $((6 * 7))"}, call_id="c1")
    model.queue_final_output("done")
    agent = SandboxAgent(name="a", model=model, instructions="x", capabilities=[Shell()])
    run = await Runner.run(
        agent, "go", run_config=RunConfig(sandbox=SandboxRunConfig(client=client))
    )
    assert run.final_output == "done"
    assert any("42" in str(getattr(item, "output", "")) for item in run.new_items)


async def test_over_a_server(server_endpoint):
    client = UnionSandboxClient(endpoint=server_endpoint)
    session = await client.create(manifest=Manifest(entries={"a.txt": File(content=b"there")}))
    async with session:
        found = await session.exec("pwd; cat a.txt")
        assert found.stdout == b"/workspace\nthere"
        await session.write(Path("b/c"), io.BytesIO(b"1"))
        assert [Path(e.path).name for e in await session.ls(".")] == ["a.txt", "b"]
        archive = await session.persist_workspace()
        assert archive.read()
    resumed = await client.resume(session.state)
    async with resumed:
        assert (await resumed.read(Path("b/c"))).read() == b"1"
    await client.delete(resumed)


@pytest.fixture
def server_endpoint():
    from served import sandbox_server

    with sandbox_server(BACKEND) as (endpoint, _):
        yield endpoint


async def test_cancelling_a_command_ends_it(client):
    async with await client.create() as session:
        task = asyncio.create_task(session.exec("echo $$ > pid; exec sleep 300"))
        while (await session.exec("test -s pid")).exit_code != 0:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gone = await session.exec(
            "for i in $(seq 100); do kill -0 $(cat pid) || exit 0; sleep 0.1; done; exit 1"
        )
        assert gone.exit_code == 0
        await client.delete(session)


async def test_a_small_archive_cannot_become_a_large_one(monkeypatch):
    from union.sandbox.adapters.openai_agents import _archive

    monkeypatch.setattr(_archive, "MAX_FILE_BYTES", 5000)

    def archive(*members):
        found = io.BytesIO()
        with tarfile.open(fileobj=found, mode="w") as tar:
            for name, data, link in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                if link:
                    info.type, info.linkname = tarfile.LNKTYPE, link
                tar.addfile(info, io.BytesIO(data))
        found.seek(0)
        return found

    fits = archive(("a", b"x" * 2000, ""), ("b", b"", "a"))
    with tarfile.open(fileobj=_archive.portable_archive(fits, roots=(), skip=())) as tar:
        members = tar.getmembers()
    assert [(m.name, m.size) for m in members] == [(".", 0), ("./a", 2000), ("./b", 2000)]
    many = archive(("a", b"x" * 2000, ""), ("b", b"", "a"), ("c", b"", "a"))
    with pytest.raises(tarfile.ReadError, match="exceed"):
        _archive.portable_archive(many, roots=(), skip=())
    dangling = archive(("b", b"", "missing"))
    with pytest.raises(tarfile.ReadError, match="no content"):
        _archive.portable_archive(dangling, roots=(), skip=())
