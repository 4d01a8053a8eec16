"""Connecting to a server, leases of sessions, limits and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from tests.conftest import WAYS, descriptors, eventually
from tests.remote.conftest import GRACE_S, is_idle, remote, sandboxes_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._core.optional_deps import install_hint

if TYPE_CHECKING:
    from pathlib import Path

UNREACHABLE = "http://127.0.0.1:1"


@pytest.mark.spec("I2", "B1")
async def test_a_lazy_session_connects_at_the_first_call():
    before = descriptors()
    async with sb.remote.session(endpoint=UNREACHABLE, connect_timeout_s=0.3) as session:
        assert descriptors() == before
        for fact in (lambda: session.work_dir, lambda: session.isolation, session.fs_allowlist):
            with pytest.raises(sb.SandboxUsageError) as caught:
                fact()
            assert caught.value.code == "not-connected"
        assert session.backend == "default"
        for call in (session.run("true"), session.put_bytes("f", b""), session.get_bytes("f")):
            began = time.monotonic()
            with pytest.raises(sb.errors.SandboxConnectionError) as failed:
                await call
            assert time.monotonic() - began > 0.2, "the client must retry"
            assert not failed.value.sent
            assert failed.value.endpoint == UNREACHABLE
            assert failed.value.hint
    assert descriptors() == before


@pytest.mark.spec("I2")
async def test_the_client_waits_for_a_server_that_starts_later():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = "0123456789abcdef0123456789"
    async with sb.remote.session(endpoint=f"http://127.0.0.1:{port}", token=token) as session:
        call = asyncio.create_task(session.exec("echo hi"))
        await asyncio.sleep(0.3)
        assert not call.done()
        with ServerProcess(bind=f"127.0.0.1:{port}") as server:
            # The token is invalid, which only a reachable server reports.
            with pytest.raises(sb.errors.SandboxConnectionError) as caught:
                await call
            assert caught.value.code == "unauthorized"
            async with remote(server) as other:
                assert (await other.exec("echo hi")).stdout == "hi\n"


@pytest.mark.spec("I2")
async def test_many_first_calls_open_one_session(quick: ServerProcess):
    before = quick.metric("sandbox_sessions_opened_total")
    async with remote(quick) as session:
        found = await asyncio.gather(*(session.exec(f"echo {n}") for n in range(8)))
        assert [r.stdout for r in found] == [f"{n}\n" for n in range(8)]
        assert session.backend == WAYS[0]
        assert session.work_dir == str(quick.work_dir)
    assert quick.metric("sandbox_sessions_opened_total") == before + 1


@pytest.mark.spec("B3", "B8")
async def test_every_session_has_its_own_work_dir_at_the_same_path(quick: ServerProcess):
    async with remote(quick) as one, remote(quick) as two:
        await one.run("echo one > f")
        await two.run("echo two > f")
        for session, expected in ((one, "one\n"), (two, "two\n")):
            path = f"{quick.work_dir}/f"
            assert (await session.exec(["cat", path])).stdout == expected
            assert await session.get_bytes(path) == expected.encode()
            assert session.work_dir == str(quick.work_dir)
            assert (await session.exec("ls -A")).stdout.split() == [".sandbox-venv", "f"]


async def _speak(answers: dict[str, object]) -> tuple[web.AppRunner, str]:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=json.dumps(answers).encode(), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.mark.spec("I2")
@pytest.mark.parametrize(
    "answers, code",
    [
        ({"status": "ok", "protocol": 99}, "version"),
        ({"status": "draining", "protocol": 1}, "draining"),
        ({"hello": "world"}, "draining"),
    ],
)
async def test_other_responses_to_health_are_refused(answers: dict[str, object], code: str):
    runner, endpoint = await _speak(answers)
    try:
        async with sb.remote.session(endpoint=endpoint, connect_timeout_s=0.2) as session:
            with pytest.raises(sb.errors.SandboxConnectionError) as caught:
                await session.run("true")
            assert caught.value.code == code
    finally:
        await runner.cleanup()


@pytest.mark.spec("A2", "I2")
def test_a_missing_extra_is_reported():
    code = """
        import sys
        sys.modules["aiohttp"] = None
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "aiohttp" else find(name, *a)
        from union import sandbox as sb
        try:
            sb.remote.session(endpoint="http://127.0.0.1:1")
        except sb.SandboxError as exc:
            print(isinstance(exc, ImportError), exc.code, exc.hint)
        from union.sandbox.server import main
        print(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", "import textwrap; exec(textwrap.dedent('''" + code + "'''))"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    command = install_hint("remote")
    assert done.stdout == f"True missing-extra {command}\n2\n"
    assert command in done.stderr


# Leases.


@pytest.mark.spec("I2")
async def test_a_connected_client_keeps_its_session(quick: ServerProcess):
    async with remote(quick) as session:
        await session.run("echo x > f")
        background = await session.run("sleep 60", background=True)
        await asyncio.sleep(GRACE_S * 1.6)
        assert (await session.exec("cat f")).stdout == "x\n"
        assert background.returncode is None


@pytest.mark.threat(125)
@pytest.mark.spec("I2")
def test_a_session_without_requests_expires(quick: ServerProcess):
    name = os.urandom(16).hex()
    path = f"/v1/sessions/{name}"
    assert quick.request("PUT", path, b"{}")[0] == 200
    for _ in range(3):
        time.sleep(GRACE_S * 0.6)
        assert quick.request("GET", path)[0] == 200, "a request renews the lease"
    time.sleep(GRACE_S + 0.5)
    assert quick.request("GET", path)[0] == 404
    assert eventually(lambda: is_idle(quick))
    status, body = quick.request("POST", f"{path}/runs", b"true")
    assert (status, json.loads(body)["error"]["code"]) == (404, "session-lost")


@pytest.mark.spec("I2")
def test_a_closed_session_name_cannot_be_reused(quick: ServerProcess):
    path = f"/v1/sessions/{os.urandom(16).hex()}"
    assert quick.request("DELETE", path)[0] == 200
    assert quick.request("PUT", path, b"{}")[0] == 404
    assert is_idle(quick)


@pytest.mark.threat(128)
@pytest.mark.spec("B7")
def test_the_server_enforces_the_timeout_of_a_session(quick: ServerProcess):
    path = f"/v1/sessions/{os.urandom(16).hex()}"
    assert quick.request("PUT", path, b'{"timeout_s": 0.2}')[0] == 200
    _, body = quick.request("POST", f"{path}/runs", b"sleep 60")
    end = json.loads(body.splitlines()[-1])["exited"]
    assert end["reason"] == "timeout"
    assert eventually(lambda: quick.request("GET", path)[0] == 404)


# Limits.


@pytest.mark.spec("I3")
async def test_the_session_limit_is_enforced():
    with ServerProcess("--max-sessions", "2") as server:
        two = [remote(server, lazy=False), remote(server, lazy=False)]
        async with two[0], two[1], remote(server) as third:
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await third.run("true")
            assert caught.value.code == "busy"
        async with remote(server) as fourth:
            assert (await fourth.run("true")).returncode == 0


@pytest.mark.spec("I3")
async def test_the_run_limit_is_enforced():
    with ServerProcess("--max-runs", "2", "--max-sessions", "1") as server:
        async with remote(server) as session:
            running = [await session.run("sleep 60", background=True) for _ in range(2)]
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await session.run("true", timeout_s=1)
            assert caught.value.code == "busy"
            running[0].kill()
            await running[0].wait()
            assert (await session.run("true")).returncode == 0


# Shutdown.


@pytest.mark.spec("I1")
async def test_sigterm_waits_for_running_commands():
    server = ServerProcess("--drain", "10")
    try:
        async with remote(server, lazy=False) as session:
            proc = await session.run("sleep 0.7; echo done", stdout=True)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: server.request("GET", "/v1/health")[0] == 503)
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await session.run("true")
            assert caught.value.code == "draining"
            out, _ = await proc.communicate()
            assert (out, await proc.wait()) == (b"done\n", 0)
            assert await asyncio.to_thread(server.process.wait, 10) == 0
            with pytest.raises(sb.SandboxError):
                await session.run("true")
    finally:
        server.stop()


@pytest.mark.threat(126)
@pytest.mark.spec("I1", "G4")
async def test_commands_are_ended_after_the_drain_time():
    server = ServerProcess("--drain", "0.3")
    try:
        async with remote(server, lazy=False) as session:
            proc = await session.run("echo up; sleep 60", stdout=True)
            assert await anext(proc.iter_stdout()) == b"up\n"
            family = sandboxes_of(server)
            assert family
            server.process.terminate()
            assert await proc.wait() == 137
            assert proc.termination_reason == "closed"
            assert await asyncio.to_thread(server.process.wait, 10) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in family)
    finally:
        server.stop()


@pytest.mark.spec("I1")
async def test_a_second_sigterm_does_not_wait():
    server = ServerProcess("--drain", "60")
    try:
        async with remote(server, lazy=False) as session:
            await session.run("sleep 60", background=True)
            for _ in range(2):
                server.process.terminate()
                await asyncio.sleep(0.2)
            assert await asyncio.to_thread(server.process.wait, 10) == 0
    finally:
        server.stop()


@pytest.mark.spec("I1")
def test_a_request_shuts_the_server_down():
    server = ServerProcess()
    try:
        assert server.request("POST", "/v1/shutdown")[0] == 202
        assert server.process.wait(10) == 0
        assert list(server.work_dir.iterdir()) == []
    finally:
        server.stop()


@pytest.mark.spec("C5")
async def test_ca_certificates_of_the_server_are_visible_in_sandboxes(tmp_path: Path, monkeypatch):
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    with ServerProcess() as server:
        monkeypatch.delenv("SSL_CERT_FILE")
        async with remote(server) as session:
            found = await session.exec('cat "$SSL_CERT_FILE"')
    assert found.stdout == "certificate"


@pytest.mark.spec("G1")
async def test_the_backend_none_warns_on_the_client(quick: ServerProcess):
    async with remote(quick, backend="none") as session:
        with pytest.warns(UserWarning, match="isolates nothing"):
            await session.run("true")


def test_an_unencrypted_token_is_logged_as_a_warning():
    with pytest.warns(UserWarning, match="without encryption"):
        sb.remote.session(endpoint="http://192.0.2.1:80", token="x" * 20)


BAD = [
    {"endpoint": "nonsense"},
    {"endpoint": UNREACHABLE, "token": ""},
    {"endpoint": UNREACHABLE, "token": "ž"},
    {"endpoint": UNREACHABLE, "token": 5},
    {"endpoint": UNREACHABLE, "cert": "sha256:ab"},
    {"endpoint": "https://h", "cert": "sha256:ab"},
    {"endpoint": "https://h", "cert": 5},
    {"endpoint": UNREACHABLE, "lazy": "no"},
    {"endpoint": UNREACHABLE, "connect_timeout_s": -1},
    {"endpoint": UNREACHABLE, "backend": "docker"},
]


@pytest.mark.spec("C10")
@pytest.mark.parametrize("options", BAD)
def test_invalid_arguments_are_refused(options: dict[str, object]):
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.remote.session(**options)  # type: ignore[arg-type]
    assert caught.value.argument == list(options)[-1]
