"""Access to a server: token, origin, capabilities, sockets, and secrets in logs."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.remote.conftest import remote
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "ab" * 16
ROUTES = [
    ("GET", "/v1/metrics"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/run"),
    ("POST", "/v1/shutdown"),
    ("PUT", f"/v1/sessions/{NAME}"),
    ("GET", f"/v1/sessions/{NAME}"),
    ("DELETE", f"/v1/sessions/{NAME}"),
    ("GET", f"/v1/sessions/{NAME}/connect"),
    ("POST", f"/v1/sessions/{NAME}/runs"),
    ("GET", f"/v1/sessions/{NAME}/file?path=x"),
    ("PUT", f"/v1/sessions/{NAME}/file?path=x"),
    ("POST", f"/v1/sessions/{NAME}/files/list"),
    ("POST", f"/v1/sessions/{NAME}/capability"),
    ("POST", "/"),
    ("GET", "/v1/nothing"),
]
WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Protocol": "union-sandbox.1",
}


def start(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start a server that is expected to exit at once."""
    return subprocess.run(
        [sys.executable, "-m", "union.sandbox.server", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environ},
    )


@pytest.mark.threat(115)
@pytest.mark.spec("I1")
@pytest.mark.parametrize("method, path", ROUTES)
def test_requests_without_the_token_are_refused(quick: ServerProcess, method: str, path: str):
    before = quick.metric("sandbox_sessions_opened_total")
    for wrong in ("", "Bearer wrong", f"Basic {quick.token}", f"Bearer {quick.token}x"):
        headers = {"Authorization": wrong, **(WEBSOCKET if "connect" in path else {})}
        status, body = quick.request(method, path, b'{"cmd": "true"}', **headers)
        assert status == 401, (wrong, body)
        assert json.loads(body)["error"]["code"] == "unauthorized"
        assert str(quick.work_dir) not in body.decode()
    assert quick.metric("sandbox_sessions_opened_total") == before


@pytest.mark.spec("I1")
def test_health_requires_no_token(quick: ServerProcess):
    status, body = quick.request("GET", "/v1/health", Authorization="")
    assert status == 200
    assert set(json.loads(body)) == {"status", "version", "protocol"}
    connection = http.client.HTTPConnection(*quick.address, timeout=10)
    connection.request("GET", "/v1/health")
    headers = connection.getresponse().headers
    connection.close()
    assert headers["Server"] == "sandbox-server", "no versions of libraries"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.spec("I1")
async def test_an_invalid_token_is_reported_at_once(quick: ServerProcess):
    session = remote(quick, token="wrong token wrong token")
    async with session:
        with pytest.raises(sb.errors.SandboxConnectionError) as caught:
            await session.run("true")
    assert caught.value.code == "unauthorized"
    assert "wrong token" not in str(caught.value)
    assert "token=" in caught.value.hint


@pytest.mark.threat(116)
@pytest.mark.spec("I1")
def test_a_reachable_address_requires_a_token():
    done = start("--bind", "0.0.0.0:0", SANDBOX_SERVER_TOKEN="")
    assert done.returncode == 2
    assert done.stdout == ""
    done = start("--bind", "0.0.0.0:0")
    assert done.returncode == 2
    assert "requires a token" in done.stderr


@pytest.mark.threat(119)
@pytest.mark.spec("I1")
async def test_logs_hold_neither_the_token_nor_commands(tmp_path: Path):
    with ServerProcess("--log-level", "debug") as server:
        async with remote(server) as session:
            await session.exec("echo from-the-command", env={"SECRET": "from-the-environment"})
            await session.put_bytes("file-name", b"from-the-file")
        server.request("GET", "/v1/sessions", Authorization="Bearer from-a-stranger")
        quiet = server.log.read_text()
        command_line = Path(f"/proc/{server.pid}/cmdline").read_text()
    assert '"event": "session opened"' in quiet
    for secret in (server.token, "from-the-", "from-a-stranger", "file-name"):
        assert str(secret) not in quiet
    assert str(server.token) not in command_line
    assert all(json.loads(line)["event"] for line in quiet.splitlines())


HOSTS = {
    "its address": ("127.0.0.1:{port}", True),
    "localhost": ("localhost:{port}", True),
    "another name": ("attacker.example:{port}", False),
    "a name like an address": ("127.0.0.1.attacker.example", False),
    "none": ("", False),
}


@pytest.mark.threat(117)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("case", HOSTS)
def test_foreign_host_names_are_refused(quick: ServerProcess, case: str):
    host, fine = HOSTS[case]
    for path in ("/v1/health", "/v1/sessions"):
        status, body = quick.request("GET", path, Host=host.format(port=quick.address[1]))
        assert (status == 200) is fine, body


ORIGINS = {
    "another origin": {"Origin": "https://attacker.example"},
    "no origin of its own": {"Origin": "null"},
    "another port": {"Origin": "http://127.0.0.1:1"},
    "https in place of http": {"Origin": "https://127.0.0.1:{port}"},
    "cross-site without an origin": {"Sec-Fetch-Site": "cross-site"},
    "same site, other origin": {"Sec-Fetch-Site": "same-site"},
}


@pytest.mark.threat(117, 118)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("case", ORIGINS)
def test_pages_of_other_origins_are_refused(quick: ServerProcess, case: str):
    port = quick.address[1]
    headers = {name: value.format(port=port) for name, value in ORIGINS[case].items()}
    before = quick.metric("sandbox_runs_started_total")
    for method, path in (*ROUTES, ("GET", "/v1/health")):
        more = WEBSOCKET if "connect" in path else {}
        status, body = quick.request(method, path, b"true", **headers, **more)
        assert status == 403, (method, path)
        assert json.loads(body)["error"]["code"] == "origin"
    assert quick.metric("sandbox_runs_started_total") == before
    # Positive control: its own origin is served.
    assert quick.request("GET", "/v1/health", Origin=f"http://127.0.0.1:{port}")[0] == 200


@pytest.mark.threat(116, 117)
def test_a_server_without_a_token_accepts_loopback_names_only():
    with ServerProcess(token=False) as server:
        assert server.request("GET", "/v1/sessions")[0] == 200
        for host in ("10.0.0.1", "attacker.example", "[2001:db8::1]:80"):
            assert server.request("GET", "/v1/sessions", Host=host)[0] == 403
    with ServerProcess("--allow-host", "sandbox.internal") as server:
        assert server.request("GET", "/v1/sessions", Host="sandbox.internal")[0] == 200
        assert server.request("GET", "/v1/sessions", Host="other.internal")[0] == 403


# Capabilities.


@pytest.fixture
def capability(quick: ServerProcess) -> Iterator[tuple[str, str]]:
    """Return a session and a capability for it."""
    name = os.urandom(16).hex()
    assert quick.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
    status, body = quick.request("POST", f"/v1/sessions/{name}/capability", b'{"expires_s": 60}')
    assert status == 200
    yield name, json.loads(body)["token"]
    quick.request("DELETE", f"/v1/sessions/{name}")


def test_a_capability_runs_and_copies_files(quick: ServerProcess, capability: tuple[str, str]):
    name, token = capability
    headers = {"Authorization": f"Bearer {token}"}
    status, body = quick.request("POST", f"/v1/sessions/{name}/runs", b"echo hi", **headers)
    assert status == 200
    assert b'"text": "hi\\n"' in body
    assert quick.request("PUT", f"/v1/sessions/{name}/file?path=f", b"x", **headers)[0] == 200
    status, body = quick.request("GET", f"/v1/sessions/{name}/file?path=f", **headers)
    assert (status, body) == (200, b"x")


@pytest.mark.threat(115)
def test_a_capability_permits_nothing_else(quick: ServerProcess, capability: tuple[str, str]):
    name, token = capability
    other = os.urandom(16).hex()
    quick.request("PUT", f"/v1/sessions/{other}", b"{}")
    for method, path in (
        ("GET", "/v1/metrics"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/run"),
        ("POST", "/v1/shutdown"),
        ("DELETE", f"/v1/sessions/{name}"),
        ("PUT", f"/v1/sessions/{name}"),
        ("POST", f"/v1/sessions/{name}/capability"),
        ("GET", f"/v1/sessions/{other}"),
        ("POST", f"/v1/sessions/{other}/runs"),
        ("DELETE", f"/v1/sessions/{other}"),
        ("PUT", f"/v1/sessions/{NAME}"),
    ):
        status, body = quick.request(method, path, b"", Authorization=f"Bearer {token}")
        assert status == 403, (method, path, body)
    assert quick.request("GET", f"/v1/sessions/{name}")[0] == 200
    assert quick.request("GET", f"/v1/sessions/{other}")[0] == 200
    quick.request("DELETE", f"/v1/sessions/{other}")


@pytest.mark.spec("R3")
@pytest.mark.threat(115)
async def test_only_a_key_of_the_session_attaches_to_it(quick: ServerProcess):
    access = {"endpoint": quick.endpoint, "token": quick.token}
    async with (
        sb.remote.session(**access, lazy=False) as one,
        sb.remote.session(**access, lazy=False) as other,
    ):
        path = f"/v1/sessions/{one.id}/capability"
        _, body = await asyncio.to_thread(quick.request, "POST", path, b"{}")
        key = json.loads(body)["token"]
        for session, token, may in (
            (one, key, True),
            (other, quick.token, True),
            (other, key, False),
            (one, "wrong", False),
            (one, None, False),
        ):
            async with sb.remote.attach(session.id, endpoint=quick.endpoint, token=token) as guest:
                if may:
                    assert (await guest.exec("echo hi")).stdout == "hi\n"
                    continue
                for call in (
                    lambda guest=guest: guest.exec("echo hi"),
                    lambda guest=guest: guest.get_bytes("f"),
                ):
                    with pytest.raises(sb.SandboxError) as caught:
                        await call()
                    assert caught.value.code in {"policy", "unauthorized"}


@pytest.mark.threat(115)
def test_a_capability_expires(quick: ServerProcess, capability: tuple[str, str]):
    name, token = capability
    path = f"/v1/sessions/{name}"
    for wrong in (b'{"expires_s": 0}', b'{"expires_s": "x"}', b'{"expires_s": 1e9}'):
        assert quick.request("POST", f"{path}/capability", wrong)[0] == 400
    _, body = quick.request("POST", f"{path}/capability", b'{"expires_s": 0.001}')
    stale = json.loads(body)["token"]
    time.sleep(0.05)
    assert quick.request("GET", path, Authorization=f"Bearer {stale}")[0] == 401
    assert quick.request("GET", path, Authorization=f"Bearer {token}")[0] == 200


# Sockets and directories.


@pytest.mark.spec("I1")
async def test_a_unix_socket(tmp_path: Path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with ServerProcess(bind=f"unix:{path}") as server:
        assert server.endpoint == f"unix://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with remote(server) as session:
            assert (await session.exec("echo hi")).stdout == "hi\n"
        again = start("--bind", f"unix:{path}", "--work-dir", str(tmp_path / "w"))
        assert again.returncode == 2
        assert "in use" in again.stderr
    assert not path.exists()


@pytest.mark.threat(49)
def test_a_socket_path_that_is_a_regular_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    done = start("--bind", f"unix:{tmp_path}/file", "--work-dir", str(tmp_path / "w"))
    assert done.returncode == 2
    assert (tmp_path / "file").read_text() == "precious"


def test_a_work_dir_that_others_can_write_is_refused(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "file").write_text("")
    for path in (shared, tmp_path / "link", tmp_path / "file", tmp_path / "no" / "parent"):
        done = start("--bind", "127.0.0.1:0", "--work-dir", str(path))
        assert done.returncode == 2
        assert "--work-dir" in done.stderr


@pytest.mark.threat(122)
@pytest.mark.spec("I1")
async def test_host_paths_must_be_allowed_by_the_operator(quick: ServerProcess, tmp_path: Path):
    (tmp_path / "f").write_text("x")
    for argument, value in (
        ("read_only_paths", ["/etc/ssl"]),
        ("read_write_paths", [str(tmp_path)]),
        ("host_work_dir", str(tmp_path)),
    ):
        async with remote(quick, **{argument: value}) as session:
            with pytest.raises(sb.PolicyError, match=argument) as caught:
                await session.run("true")
        assert "--allow-path" in caught.value.hint
    with ServerProcess("--allow-path", str(tmp_path)) as server:
        (tmp_path / "out").symlink_to("/etc/ssl")
        async with remote(server, read_only_paths=[str(tmp_path / "f")]) as session:
            assert (await session.exec(["cat", str(tmp_path / "f")])).stdout == "x"
        for beyond in (str(tmp_path / "out"), f"{tmp_path}/../../etc", f"{tmp_path}x"):
            async with remote(server, read_only_paths=[beyond]) as session:
                with pytest.raises(sb.PolicyError, match="read_only_paths"):
                    await session.run("true")


@pytest.mark.threat(114)
@pytest.mark.spec("G1")
async def test_a_backend_that_the_server_does_not_offer_is_refused():
    with ServerProcess("--backend", "userns") as server:
        async with remote(server, backend="none") as session:
            with pytest.raises(sb.SandboxUsageError, match="backend"):
                await session.run("true")


@pytest.mark.threat(122)
@pytest.mark.spec("I1", "C9")
async def test_the_network_ceiling_of_the_server_is_enforced():
    limits = ("--network-mode", "allowlist", "--network-allow", "*.example.com")
    with ServerProcess(*limits) as server:
        for options in (
            {"network_mode": "open"},
            {"network_mode": "allowlist", "network_allowlist": ["example.org"]},
        ):
            async with remote(server, **options) as session:
                with pytest.raises(sb.PolicyError, match="the server"):
                    await session.run("true")
        narrow = {"network_mode": "allowlist", "network_allowlist": ["a.example.com"]}
        async with remote(server, **narrow) as session:
            assert (await session.run("true")).returncode == 0
