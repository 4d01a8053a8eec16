"""Attacks on a server over the network: web pages, bodies, frames, URLs, restarts, timeouts."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp
import pytest
from tests.conftest import ISOLATED, SOON_S, descendants, eventually
from tests.remote.conftest import is_idle, remote
from tests.remote.test_protocol import raw, start_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, Offsets
from union.sandbox.server._config import config_from_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024


def exchange(server: ServerProcess, head: str, body: bytes = b"") -> tuple[int, dict[str, str]]:
    """Send one request as raw text; return the status and the headers."""
    with socket.create_connection(server.address, timeout=10) as sock:
        host, port = server.address
        sock.sendall(f"{head}\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode() + body)
        response = http.client.HTTPResponse(sock)
        response.begin()
        response.read()
        return response.status, {k.lower(): v for k, v in response.getheaders()}


# Web pages.

SIMPLE = {
    "text": "Content-Type: text/plain",
    "form": "Content-Type: application/x-www-form-urlencoded",
    "parts": "Content-Type: multipart/form-data; boundary=x",
    "nothing": "Accept: */*",
}


@pytest.mark.threat(118)
@pytest.mark.parametrize("token", [True, False], ids=["token", "no token"])
def test_simple_requests_of_web_pages_are_refused(*, token: bool):
    """Requests that a browser sends without a preflight, also if no token is required."""
    body = b'{"cmd": "true"}'
    with ServerProcess(token=token) as server:
        origins = ("Origin: https://attacker.example", "Sec-Fetch-Site: cross-site")
        for kind, origin in itertools.product(SIMPLE, origins):
            head = f"POST /v1/run HTTP/1.1\r\n{SIMPLE[kind]}\r\n{origin}\r\n"
            status, headers = exchange(server, f"{head}Content-Length: {len(body)}", body)
            assert status == 403, (kind, origin)
            assert not [name for name in headers if name.startswith("access-control-")]
        assert server.metric("sandbox_runs_started_total") == 0
        status, answer = server.request("POST", "/v1/run", body, **{"Content-Type": "text/json"})
        assert status == 200, answer
        assert server.metric("sandbox_runs_started_total") == 1, "positive control"


@pytest.mark.threat(118)
def test_preflight_requests_are_refused(quick: ServerProcess):
    """For any origin, also the server's own, which needs no preflight."""
    for origin in ("https://attacker.example", "null", quick.endpoint):
        for path in ("/v1/run", "/v1/sessions", "/v1/health"):
            head = (
                f"OPTIONS {path} HTTP/1.1\r\nOrigin: {origin}\r\n"
                "Access-Control-Request-Method: POST\r\n"
                "Access-Control-Request-Headers: authorization"
            )
            status, headers = exchange(quick, head)
            assert status >= 400
            assert not [name for name in headers if name.startswith("access-control-")]


@pytest.mark.threat(115, 117)
def test_the_token_is_accepted_in_its_header_only(quick: ServerProcess):
    """Not in a cookie, a query or a password, which a browser would send for another page."""
    token = quick.token
    for tried in (
        f"GET /v1/sessions HTTP/1.1\r\nCookie: token={token}; Authorization=Bearer {token}",
        f"GET /v1/sessions?token={token}&access_token={token} HTTP/1.1",
        f"GET /v1/sessions HTTP/1.1\r\nX-Token: {token}\r\nProxy-Authorization: Bearer {token}",
    ):
        assert exchange(quick, tried)[0] == 401, tried
    fine = f"GET /v1/sessions HTTP/1.1\r\nAuthorization: Bearer {token}"
    assert exchange(quick, fine)[0] == 200


@pytest.mark.threat(116)
def test_the_default_address_is_loopback():
    assert [bind.host for bind in config_from_arguments([], {}).binds] == ["127.0.0.1"]
    for reachable in ("0.0.0.0:1", "[::]:1", "192.0.2.1:1"):
        with pytest.raises(sb.SandboxUsageError, match="requires a token"):
            config_from_arguments(["--bind", reachable], {})
        given = {"SANDBOX_SERVER_TOKEN": "a token of enough letters"}
        assert config_from_arguments(["--bind", reachable], given).binds, "positive control"


@pytest.mark.threat(119)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_the_token_is_in_no_process_below_the_server(backend: str):
    """Checked from the host, while commands run and prepared sandboxes wait."""
    with ServerProcess("--backend", backend) as server:
        token = str(server.token).encode()
        async with remote(server, env={"OWN": "seen"}) as session:
            proc = await session.run("echo up; sleep 30", stdout=True)
            assert await anext(proc.iter_stdout_lines()) == "up"
            found: list[tuple[str, bytes]] = []

            def is_checked() -> bool:
                """The environment of a process that just executes a program is empty."""
                for pid in descendants(server.pid):
                    for path in (f"/proc/{pid}/environ", f"/proc/{pid}/cmdline"):
                        with contextlib.suppress(OSError):
                            found.append((path, Path(path).read_bytes()))
                return any(b"OWN=seen" in text for _, text in found)

            assert eventually(is_checked), "the run is checked"
            assert not [path for path, text in found if token in text]
        with contextlib.suppress(PermissionError):
            own = Path(f"/proc/{server.pid}/environ").read_bytes()
            assert token in own, "positive control: here it was given"


# URLs where a path is expected.


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(0.2)
        yield found


@pytest.mark.threat(121)
async def test_a_url_as_a_path_is_not_fetched(quick: ServerProcess, listener: socket.socket):
    """No call fetches URLs; a URL given as a path is the name of a file."""
    inner = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    async with remote(quick, lazy=False) as session:
        name = session._transport.name  # type: ignore[union-attr]
        for url in ("file:///etc/passwd", inner, "ftp://127.0.0.1/x", "data:,x", "gopher://x/"):
            with pytest.raises(sb.SandboxError):
                await session.get_bytes(url)
            quoted = quote(url, safe="")
            status, body = quick.request("GET", f"/v1/sessions/{name}/file?path={quoted}")
            assert status >= 400
            assert b"root:" not in body
        assert await session.put_bytes(inner, b"a file") == 6
        assert await session.get_bytes(inner) == b"a file"
        assert (await session.exec(["cat", inner])).stdout == "a file", "positive control"
    with pytest.raises(TimeoutError):
        listener.accept()


# Bodies and frames.


def _peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.threat(123)
def test_a_body_of_300_megabytes_is_not_buffered():
    """With and without the token, with a length and in chunks: aborted or drained."""
    chunk = bytes(MIB)
    with ServerProcess() as server:
        server.request("GET", "/v1/health")
        before = _peak(server.pid)
        for token in (server.token, "wrong"):
            for framing in (f"Content-Length: {300 * MIB}", "Transfer-Encoding: chunked"):
                head = (
                    f"POST /v1/run HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {token}\r\n{framing}\r\n\r\n"
                )
                with (
                    socket.create_connection(server.address, timeout=10) as sock,
                    contextlib.suppress(OSError),
                ):
                    sock.sendall(head.encode())
                    for _ in range(300):
                        size = b"100000\r\n" if "chunked" in framing else b""
                        sock.sendall(size + chunk + (b"\r\n" if size else b""))
        assert _peak(server.pid) - before < 40 * MIB
        status, _ = server.request("POST", "/v1/run", b'{"cmd": "true"}')
        assert status == 200


@pytest.mark.threat(123)
def test_false_lengths_are_refused(quick: ServerProcess):
    """Ten kinds of false lengths: nothing runs, and the next request is served."""
    before = quick.metric("sandbox_runs_started_total")
    body = b'{"cmd": "true"}'
    lengths = (
        "Content-Length: -1", "Content-Length: 1, 2", "Content-Length: 0x10", "Content-Length: 1_5",
        "Content-Length: 99999999999999999999", f"Content-Length: {len(body)}\r\nContent-Length: 3",
        f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked", "Transfer-Encoding: xchunked",
        "Content-Length: +15", "Content-Length:",
    )  # fmt: skip
    for length in lengths:
        head = (
            f"POST /v1/run HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {quick.token}\r\n{length}\r\n\r\n"
        )
        with socket.create_connection(quick.address, timeout=3) as sock:
            sock.sendall(head.encode() + body)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                assert b" 200 " not in sock.recv(4096), length
    assert quick.metric("sandbox_runs_started_total") == before
    assert quick.request("POST", "/v1/run", body)[0] == 200


@pytest.mark.threat(123)
async def test_300_mutations_of_valid_frames(quick: ServerProcess):
    """Flipped bits, removed and doubled parts: the server survives and keeps nothing."""
    chance = random.Random(123)
    good = [
        start_of(1, "true", stdin=True),
        wire.encode_numbered(Kind.STDIN, 1, 1, b"hello"),
        wire.encode_numbered(Kind.CONTROL, 1, 1, wire.to_json({"op": "eof"})),
        wire.encode_offsets(Kind.ACK, 1, Offsets(0, 0, 0)),
    ]
    sent = 0
    while sent < 300:
        async with raw(quick) as client:
            # The first invalid frame closes a connection, so each one carries few.
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                for _ in range(10):
                    data = bytearray(chance.choice(good))
                    for _ in range(chance.randrange(1, 4)):
                        at = chance.randrange(len(data))
                        match chance.randrange(3):
                            case 0:
                                data[at] ^= 1 << chance.randrange(8)
                            case 1:
                                del data[at : at + chance.randrange(1, 9)]
                            case _:
                                data[at:at] = data[: chance.randrange(1, 9)]
                        data = data or bytearray(b"\0")
                    await client.ws.send_bytes(bytes(data))
                    sent += 1
    assert eventually(lambda: is_idle(quick))
    assert quick.metric("sandbox_buffer_bytes") == 0
    async with remote(quick) as session:
        assert (await session.exec("echo fine")).stdout == "fine\n"


# A restart.


@pytest.mark.threat(126, 127)
async def test_a_restart_keeps_pinned_files_and_removes_sessions(tmp_path: Path):
    """Same port and work dirs: pinned files are served again, private ones are not."""
    pinned = tmp_path / "pinned"
    pinned.mkdir()
    options = ("--allow-path", str(pinned), "--work-dir", str(tmp_path / "work"))
    first = ServerProcess(*options)
    try:
        one, two = remote(first, lazy=False, host_work_dir=str(pinned)), remote(first, lazy=False)
        await one.open()
        await two.open()
        await one.put_bytes("kept", b"kept")
        await two.put_bytes("private", b"private")
        names = [s._transport.name for s in (one, two)]  # type: ignore[union-attr]
        first.process.kill()
        first.process.wait()
        port = first.address[1]
        with ServerProcess(*options, bind=f"127.0.0.1:{port}") as second:
            assert second.address == first.address
            for name in names:
                status, body = second.request("GET", f"/v1/sessions/{name}/file?path=private")
                assert (status, json.loads(body)["error"]["code"]) == (404, "session-lost")
            for lost in (one, two):
                with pytest.raises(sb.SandboxError):
                    await lost.exec("true")
            async with remote(second, host_work_dir=str(pinned)) as again:
                assert await again.get_bytes("kept") == b"kept"
            async with remote(second) as fresh:
                assert (await fresh.exec("ls; cat private")).stdout == ""
        await one.close()
        await two.close()
    finally:
        first.stop()


# Time.


@pytest.mark.threat(128)
def test_a_run_ends_with_the_timeout_of_its_session(quick: ServerProcess):
    """Over plain HTTP, without the checks of the client library."""
    path = f"/v1/sessions/{os.urandom(16).hex()}"
    assert quick.request("PUT", path, b'{"timeout_s": 0.3}')[0] == 200
    begun = time.monotonic()
    body = json.dumps({"cmd": "sleep 60", "timeout_s": 86_400}).encode()
    headers = {"Content-Type": "application/json"}
    _, answer = quick.request("POST", f"{path}/runs", body, **headers)
    assert json.loads(answer.splitlines()[-1])["exited"]["reason"] == "timeout"
    assert time.monotonic() - begun < SOON_S


@pytest.mark.threat(128)
async def test_the_timeout_limit_of_the_server_is_enforced():
    """For a timeout of a day or none; a shorter timeout is kept."""
    with ServerProcess("--max-session-s", "0.3", "--grace", "20") as server:
        for asked in (86_400.0, None):
            begun = time.monotonic()
            async with remote(server, timeout_s=asked) as session:
                with contextlib.suppress(sb.SandboxError):
                    result = await session.exec("sleep 60")
                    assert result.termination_reason == "timeout"
            assert time.monotonic() - begun < SOON_S
        assert eventually(lambda: is_idle(server))
    with ServerProcess("--max-session-s", "60") as server:
        async with remote(server) as session:
            assert (await session.exec("sleep 0.5; echo whole")).stdout == "whole\n"
