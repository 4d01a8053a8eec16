"""Denial of service by clients without a key, or with a key for one session."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import select
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.conftest import SOON_S, eventually
from tests.remote.conftest import is_idle, remote
from tests.remote.test_protocol import start_of
from tests.servers import ServerProcess

from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, Offsets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1024 * 1024
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def open_files(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def session_with_capability(server: ServerProcess) -> tuple[str, str]:
    """Return a session and a capability for it."""
    name = os.urandom(16).hex()
    assert server.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
    status, body = server.request("POST", f"/v1/sessions/{name}/capability", b"{}")
    assert status == 200
    return name, json.loads(body)["token"]


@contextlib.asynccontextmanager
async def connected(
    server: ServerProcess, name: str, token: str | None
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(server.endpoint, headers=headers) as client,
        client.ws_connect(
            f"/v1/sessions/{name}/connect", protocols=(wire.PROTOCOL,), max_msg_size=0
        ) as ws,
    ):
        yield ws


# Connections.


@pytest.mark.threat(152)
@pytest.mark.spec("I3")
@pytest.mark.parametrize(
    "attack", ["one request", "half a second request", "half a first request", "silent"]
)
def test_connections_without_a_key_do_not_block_a_client_with_the_token(attack: str):
    limit = 96
    with ServerProcess("--max-connections", str(limit)) as server, contextlib.ExitStack() as stack:
        held = []
        for _ in range(2 * limit):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=10))
            with contextlib.suppress(ConnectionError):
                if attack in {"one request", "half a second request"}:
                    sock.sendall(HEALTH)
                    assert b" 200 " in sock.recv(4096), "a connection without a key is served"
                if attack in {"half a first request", "half a second request"}:
                    sock.sendall(HEALTH[:30])
            held.append(sock)
        if attack in {"half a first request", "silent"}:
            full = lambda: server.metric("sandbox_connections") >= limit - 2  # noqa: E731
            assert eventually(full), "positive control: the limit is reached"
        for _ in range(20):
            begun = time.monotonic()
            status, body = server.request("POST", "/v1/run", b"echo fine")
            assert status == 200
            assert b"fine" in body
            assert time.monotonic() - begun < SOON_S
        assert server.metric("sandbox_connections") <= limit


@pytest.mark.threat(152)
def test_a_response_without_a_key_closes_the_connection(quick: ServerProcess):
    """With the token the connection is kept alive."""
    for path, headers, stays in (
        ("/v1/health", {}, False),
        ("/console/", {}, False),
        ("/v1/sessions", {}, False),
        ("/v1/sessions", {"Authorization": "Bearer wrong"}, False),
        ("/v1/health", {"Authorization": f"Bearer {quick.token}"}, True),
        ("/v1/sessions", {"Authorization": f"Bearer {quick.token}"}, True),
    ):
        connection = http.client.HTTPConnection(*quick.address, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            response.read()
            assert (connection.sock is not None) is stays, (path, headers, response.status)


@pytest.mark.threat(152)
def test_a_limited_key_cannot_use_all_connections():
    with ServerProcess("--max-connections", "32") as server, contextlib.ExitStack() as stack:
        name, capability = session_with_capability(server)
        head = (
            f"POST /v1/sessions/{name}/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {capability}\r\nContent-Length: 100\r\n\r\n"
        )
        answers = []
        for number in range(32):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=10))
            sock.sendall(head.encode())  # and never the body
            sock.settimeout(0.05 if number < 8 else SOON_S)
            with contextlib.suppress(TimeoutError):
                answers.append(sock.recv(200))
        assert len(answers) == 24, "eight connections are held, the others refused"
        assert all(b" 503 " in answer for answer in answers)
        assert server.request("POST", f"/v1/sessions/{name}/runs", b"echo fine")[0] == 200


@pytest.mark.threat(153)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("attack", ["silent", "half a hello", "a whole hello", "no tls"])
def test_connections_count_before_the_tls_handshake(attack: str):
    limit, opened = 64, 400
    context = ssl._create_unverified_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    sent = {"silent": b"", "half a hello": hello[:99], "a whole hello": hello, "no tls": HEALTH}
    options = ("--tls-self-signed", "--max-connections", str(limit))
    with ServerProcess(*options) as server, contextlib.ExitStack() as stack:

        def ask(
            connection: http.client.HTTPConnection, path: str, body: bytes
        ) -> tuple[int, bytes]:
            headers = {"Authorization": f"Bearer {server.token}"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

        tenant = http.client.HTTPSConnection(*server.address, context=context, timeout=20)
        stack.callback(tenant.close)
        assert ask(tenant, "/v1/run", b"echo fine")[0] == 200
        files, memory = open_files(server), resident(server.pid)
        held = []
        for _ in range(opened):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=10))
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent[attack])
            held.append(sock)
        assert len(held) > 4 * limit, "positive control: this many were opened"
        assert eventually(lambda: open_files(server) <= files + limit + 20)
        assert resident(server.pid) - memory < 120 * MIB
        status, body = ask(tenant, "/v1/run", b"echo fine")
        assert (status, b"fine" in body) == (200, True)
        newcomer = http.client.HTTPSConnection(*server.address, context=context, timeout=20)
        stack.callback(newcomer.close)
        assert ask(newcomer, "/v1/run", b"echo fine")[0] == 200
        log = server.log.read_text()
        assert "Traceback" not in log
        assert len(log) < 20_000


# Memory.


@pytest.mark.threat(154)
@pytest.mark.spec("I3")
def test_the_outcome_of_a_framed_upload_is_bounded(quick: ServerProcess):
    name, capability = session_with_capability(quick)
    before = resident(quick.pid)
    piece = b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"
    head = (
        f"PUT /v1/sessions/{name}/file?path=x&framed=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {capability}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(quick.address, timeout=20) as sock:
        sock.sendall(head.encode() + b"4\r\n\xff\xff\xff\xff\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                sock.sendall(piece)
                assert resident(quick.pid) - before < 40 * MIB
            sock.sendall(b"0\r\n\r\n")
            assert b" 400 " in sock.recv(4096)
    whole = b"".join((struct.pack(">I", 5), b"whole", b"\xff" * 4, b'{"done":true}'))
    # The lease of the first session may have expired on a busy machine.
    name, _ = session_with_capability(quick)
    path = f"/v1/sessions/{name}/file?path=x"
    assert quick.request("PUT", f"{path}&framed=1", whole)[0] == 200, "positive control"
    assert quick.request("GET", path) == (200, b"whole")
    quick.request("DELETE", f"/v1/sessions/{name}")


@pytest.mark.threat(154)
@pytest.mark.spec("I3")
async def test_unfinished_starts_of_a_limited_key_are_bounded(quick: ServerProcess):
    name, capability = session_with_capability(quick)
    before = resident(quick.pid)
    chunk = bytes(wire.MAX_CHUNK)
    refused = 0
    async with connected(quick, name, capability) as ws:
        for run in range(1, 6):
            for at in range(0, 60 * MIB, len(chunk)):
                part = struct.pack(">IB", at, 0) + chunk
                await ws.send_bytes(wire.encode(Kind.START, run, part))
        async with asyncio.timeout(40):
            while refused < 4:
                for frame in wire.decode((await ws.receive()).data):
                    assert frame.kind is Kind.EVENT
                    refused += b'"busy"' in bytes(frame.payload)
        assert resident(quick.pid) - before < 150 * MIB
        async with connected(quick, name, quick.token) as owner:
            await owner.send_bytes(start_of(1, "echo fine", stdout=True))
            assert await _has_output(owner, b"fine")
    quick.request("DELETE", f"/v1/sessions/{name}")
    assert eventually(lambda: is_idle(quick))


async def _has_output(ws: aiohttp.ClientWebSocketResponse, text: bytes) -> bool:
    async with asyncio.timeout(40):
        async for message in ws:
            for frame in wire.decode(message.data):
                if frame.kind is Kind.OUTPUT and text in bytes(frame.payload):
                    return True
                if frame.kind is Kind.EVENT and b"refused" in bytes(frame.payload):
                    return False
    return False


@pytest.mark.threat(154)
@pytest.mark.spec("I3")
def test_kept_output_of_idempotent_runs_is_bounded():
    with ServerProcess("--max-buffer-mib", "16") as server:
        name, capability = session_with_capability(server)
        headers = {"Authorization": f"Bearer {capability}"}
        path = f"/v1/sessions/{name}/runs"
        command = b"cat /proc/sys/kernel/random/uuid; head -c 500000 /dev/zero"
        bodies = []
        for number in range(12):
            headers["Idempotency-Key"] = f"job {number}"
            status, body = server.request("POST", path, command, **headers)
            assert status == 200
            bodies.append(body)
        assert sum(map(len, bodies)) > 12 * 500_000, "positive control: this much was written"
        assert server.metric("sandbox_buffer_bytes") <= 2 * MIB
        # The last run can be repeated; the first one is known and does not run a second time.
        assert server.request("POST", path, command, **headers) == (200, bodies[-1])
        headers["Idempotency-Key"] = "job 0"
        status, body = server.request("POST", path, command, **headers)
        assert (status, json.loads(body)["error"]["code"]) == (400, "run-lost")
        assert server.metric("sandbox_runs_started_total") == 12


@pytest.mark.threat(152, 154)
def test_endless_headers_take_little_memory():
    with ServerProcess("--max-connections", "128") as server, contextlib.ExitStack() as stack:
        before = resident(server.pid)
        for _ in range(128):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=10))
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                for number in range(100):
                    sock.sendall(b"X-%d: %s\r\n" % (number, b"x" * 8000))
        assert resident(server.pid) - before < 60 * MIB, "of 100 MiB that were sent"
        long = "x" * 8000
        headers = {f"X-{number}": long for number in range(6)}
        assert server.request("GET", "/v1/health", **headers)[0] == 200, "positive control"


def _answers(sockets: list[socket.socket], wanted: int) -> list[bytes]:
    """Return what the server answers; waits until there are ``wanted`` answers, and a moment."""
    found: dict[socket.socket, bytes] = {}
    end = time.monotonic() + SOON_S
    while (wait_s := SOON_S if len(found) < wanted else 0.3) and time.monotonic() < end:
        silent = [sock for sock in sockets if sock not in found]
        ready, _, _ = select.select(silent, [], [], wait_s)
        if not ready:
            break
        for sock in ready:
            found[sock] = b""
            with contextlib.suppress(ConnectionError):
                found[sock] = sock.recv(300)
    return list(found.values())


@pytest.mark.threat(154)
def test_many_bodies_at_once_are_bounded(quick: ServerProcess):
    name, capability = session_with_capability(quick)
    before = resident(quick.pid)
    head = (
        f"POST /v1/sessions/{name}/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {capability}\r\nContent-Length: {16 * MIB}\r\n\r\n"
    ).encode()
    held = []
    with contextlib.ExitStack() as stack:
        for _ in range(14):
            sock = stack.enter_context(socket.create_connection(quick.address, timeout=20))
            sock.sendall(head)
            with contextlib.suppress(ConnectionError):
                sock.sendall(bytes(15 * MIB))
            held.append(sock)
        assert sum(b" 503 " in answer for answer in _answers(held, 5)) >= 5
        assert resident(quick.pid) - before < 160 * MIB
        status, body = quick.request("POST", f"/v1/sessions/{name}/runs", b"echo fine")
        assert (status, b"fine" in body) == (200, True)
    quick.request("DELETE", f"/v1/sessions/{name}")


# Runs and frames.


@pytest.mark.threat(159, 168)
@pytest.mark.spec("I3")
async def test_unread_runs_of_a_guest_do_not_block_the_owner():
    with ServerProcess("--max-runs", "16", "--max-sessions", "2") as server:
        name, capability = session_with_capability(server)
        async with connected(server, name, capability) as guest:
            starts = [start_of(n, "true") for n in range(1, 200)]
            for at in range(0, len(starts), 10):
                await guest.send_bytes(b"".join(starts[at : at + 10]))
                await asyncio.sleep(0.01)

            def kept() -> int:
                listed = server.get_json("/v1/sessions")["sessions"]
                [runs] = [each["runs"] for each in listed if each["session"] == name]
                return len(runs)

            assert eventually(lambda: kept() >= 8), "positive control: a full share is kept"
            assert kept() <= 16
            async with connected(server, name, server.token) as owner:
                await owner.send_bytes(start_of(1000, "echo fine", stdout=True))
                assert await _has_output(owner, b"fine")
            assert not guest.closed
        assert server.metric("sandbox_frames_bad_total") == 0


@pytest.mark.threat(168)
@pytest.mark.spec("I3")
async def test_a_session_cannot_use_all_run_slots():
    with ServerProcess("--max-runs", "12", "--max-sessions", "3", "--drain", "1") as server:
        greedy, _ = session_with_capability(server)
        async with connected(server, greedy, server.token) as ws:
            await ws.send_bytes(b"".join(start_of(n, "sleep 60") for n in range(1, 40)))
            assert eventually(lambda: server.metric("sandbox_runs_refused_total") >= 31)
            assert server.metric("sandbox_runs") == 8, "positive control: it has exactly its share"
            async with remote(server) as other:
                results = await asyncio.gather(*(other.exec("echo fine") for _ in range(2)))
                assert [result.stdout for result in results] == ["fine\n"] * 2
            assert not ws.closed
            assert server.metric("sandbox_frames_bad_total") == 0


@pytest.mark.threat(159, 168)
@pytest.mark.spec("I3")
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_two_thousand_starts_at_once_are_served_or_refused_one_by_one():
    """A client that repeats the refused runs completes all of them."""
    count = 2000
    with ServerProcess() as server:
        name, _ = session_with_capability(server)
        async with connected(server, name, server.token) as ws:
            waiting, done = set(range(1, count + 1)), set()
            while waiting:
                batch = sorted(waiting)
                for at in range(0, len(batch), 100):
                    frames = (start_of(n, "true") for n in batch[at : at + 100])
                    await ws.send_bytes(b"".join(frames))
                answered: set[int] = set()
                while len(answered) < len(batch):
                    for frame in wire.decode((await ws.receive(60)).data):
                        if frame.kind is not Kind.EVENT:
                            continue
                        number, data = wire.decode_numbered(frame.payload)
                        payload = wire.parse_json(data)
                        if "refused" in payload:
                            assert payload["refused"]["code"] == "busy"
                        if payload.keys() & {"refused", "exited"}:
                            answered.add(frame.run)
                        if "exited" in payload:
                            done.add(frame.run)
                            ack = wire.encode_offsets(
                                Kind.ACK, frame.run, Offsets(0, 0, number + 1)
                            )
                            await ws.send_bytes(ack)
                waiting -= done
        assert len(done) == count
        assert server.metric("sandbox_frames_bad_total") == 0


@pytest.mark.threat(169)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("flood", ["empty messages", "pings", "unknown acks"])
async def test_meaningless_frames_do_not_slow_down_other_clients(flood: str):
    with ServerProcess() as server:
        name, capability = session_with_capability(server)
        async with remote(server) as bystander:
            await bystander.exec("true")
            async with connected(server, name, capability) as ws:
                transport = ws._response.connection.transport
                mask = b"\0\0\0\0"
                frame = {
                    "empty messages": b"\x82\x80" + mask,
                    "pings": b"\x89\x80" + mask,
                    "unknown acks": b"\x82\xa1"
                    + mask
                    + wire.encode_offsets(Kind.ACK, 9, Offsets()),
                }[flood]
                begun, slowest = time.monotonic(), 0.0
                while time.monotonic() - begun < 2:
                    if not transport.is_closing() and transport.get_write_buffer_size() < 2 * MIB:
                        transport.write(frame * 20_000)
                    asked = time.monotonic()
                    assert (await bystander.exec("echo fine")).stdout == "fine\n"
                    slowest = max(slowest, time.monotonic() - asked)
                assert slowest < 2.0
                transport.abort()
            assert server.metric("sandbox_runs_refused_total") == 0
        is_refused = server.metric("sandbox_frames_bad_total") == 1
        assert is_refused is (flood == "empty messages"), "empty messages are a protocol error"
