"""Invalid frames and requests: clear errors, bounded memory, no crash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.conftest import SOON_S, eventually
from tests.remote.conftest import is_idle, remote
from tests.servers import ServerProcess

from union.sandbox._core.resolve import resolve_run, resolve_session
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import MAX_CHUNK, WINDOW, Kind, Offsets
from union.sandbox._wire.values import MAX_START, encode_run
from union.sandbox.server._quotas import MIN_STREAM_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1024 * 1024
ONE_READ = MAX_CHUNK + 1024
"""Excess of one stream over its limit: one read of its pipe, and the cost of a piece."""
SPEC = resolve_session(backend="userns", backends=("userns",))


def start_of(run: int, cmd: str, **options: object) -> bytes:
    return b"".join(wire.encode_start(run, encode_run(resolve_run(SPEC, cmd, **options), SPEC)))


class Raw:
    """A raw WebSocket connection that sends arbitrary frames."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def frames(self) -> AsyncIterator[wire.Frame]:
        async for message in self.ws:
            if message.type is aiohttp.WSMsgType.BINARY:
                for frame in wire.decode(message.data):
                    yield frame

    async def refusals(self, count: int) -> AsyncIterator[str]:
        """Return the codes of the first ``count`` refused runs."""
        async for frame in self.frames():
            if frame.kind is Kind.EVENT:
                event = wire.parse_json(wire.decode_numbered(frame.payload)[1])
                if "refused" in event:
                    yield event["refused"]["code"]
                    count -= 1
                    if not count:
                        return

    async def refused(self) -> str:
        """Return the reason with which the server closes the connection."""
        async with asyncio.timeout(40):
            async for _ in self.ws:
                pass
        assert self.ws.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
        return ""


@contextlib.asynccontextmanager
async def raw(server: ServerProcess, *, name: str | None = None) -> AsyncIterator[Raw]:
    session = name or os.urandom(16).hex()
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(server.endpoint, headers=headers) as http:
        if name is None:
            async with http.put(f"/v1/sessions/{session}", json={}) as response:
                assert response.status == 200
        async with http.ws_connect(
            f"/v1/sessions/{session}/connect", protocols=(wire.PROTOCOL,), max_msg_size=0
        ) as ws:
            yield Raw(ws)
        if name is None:
            await (await http.delete(f"/v1/sessions/{session}")).read()


HEAD = struct.Struct(">BQI")
MALFORMED = {
    "nothing known": b"\x00" * 40,
    "a head cut short": b"\x01\x00",
    "a size that is not there": HEAD.pack(1, 1, 2**32 - 1),
    "a frame for clients": wire.encode_output_head(1, 1, 0, 1) + b"x",
    "a start in the middle": wire.encode(Kind.START, 1, struct.pack(">IB", 100, 1) + b"x"),
    "a start of nonsense": wire.encode(Kind.START, 1, struct.pack(">IB", 0, 1) + b"\xff" * 50),
    "a start without JSON": b"".join(wire.encode_start(1, struct.pack(">II", 3, 0) + b"{]}")),
    "a start with a stranger": b"".join(
        wire.encode_start(1, struct.pack(">II", 28, 1) + b'{"kind":"shell","uid":0    }x')
    ),
    "offsets cut short": wire.encode(Kind.ACK, 0, b"123"),
    "a parts bomb": wire.encode(Kind.START, 1, bytes(300 * 1024)),
}


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("case", MALFORMED)
async def test_an_invalid_frame_closes_only_its_connection(quick: ServerProcess, case: str):
    before = quick.metric("sandbox_frames_bad_total")
    async with remote(quick) as bystander:
        background = await bystander.run("sleep 60", background=True)
        async with raw(quick) as client:
            if "offsets" in case:
                await client.ws.send_bytes(start_of(0, "sleep 5"))
            await client.ws.send_bytes(MALFORMED[case])
            await client.refused()
        assert (await bystander.exec("echo fine")).stdout == "fine\n"
        assert background.returncode is None
    assert quick.metric("sandbox_frames_bad_total") == before + 1


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
async def test_text_and_oversized_messages_are_refused(quick: ServerProcess):
    async with raw(quick) as client:
        await client.ws.send_str("hello")
        await client.refused()
    async with raw(quick) as client:
        await client.ws.send_bytes(bytes(wire.MAX_MESSAGE + 1))
        async for _ in client.ws:
            pass
        assert client.ws.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
async def test_invalid_controls_of_a_run_are_refused(quick: ServerProcess):
    control = wire.to_json({"op": "format", "disk": True})
    for frame in (
        wire.encode_numbered(Kind.CONTROL, 1, 1, control),
        wire.encode_numbered(Kind.CONTROL, 1, 1, b"[]"),
        wire.encode_numbered(Kind.CONTROL, 1, 1, wire.to_json({"op": "signal", "signum": 999})),
        wire.encode_numbered(
            Kind.CONTROL, 1, 1, wire.to_json({"op": "resize", "rows": 0, "cols": 9})
        ),
        wire.encode_numbered(Kind.CONTROL, 1, 5, wire.to_json({"op": "eof"})),
        wire.encode_offsets(Kind.ACK, 1, Offsets(10**9, 0, 0)),
        wire.encode_offsets(Kind.ATTACH, 1, Offsets(10**9, 0, 0)),
        b"".join(wire.encode_numbered(Kind.STDIN, 1, n, bytes(200_000)) for n in (1, 2, 3, 4, 5)),
    ):
        async with raw(quick) as client:
            await client.ws.send_bytes(start_of(1, "sleep 60", stdin=True))
            frames = client.frames()
            assert (await anext(frames)).kind is Kind.EVENT
            await client.ws.send_bytes(frame)
            if frame.startswith(bytes([Kind.STDIN])):
                more = [
                    wire.encode_numbered(Kind.STDIN, 1, n, bytes(200_000)) for n in range(6, 10)
                ]
                await client.ws.send_bytes(b"".join(more))
            await client.refused()


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
async def test_state_of_one_client_is_bounded():
    many = range(1, 300)
    with ServerProcess("--max-runs", "2") as server:
        for frames in (
            [wire.encode(Kind.START, n, struct.pack(">IB", 0, 0) + b"x") for n in many],
            [start_of(n, "true") for n in many],
        ):
            # Runs over the limit are refused one by one; the connection stays open.
            async with raw(server) as client:
                await client.ws.send_bytes(b"".join(frames))
                async with asyncio.timeout(40):
                    codes = [code async for code in client.refusals(200)]
                assert set(codes) == {"busy"}
        assert eventually(lambda: server.metric("sandbox_buffer_bytes") == 0)
        assert await _exec(server, "echo fine") == "fine\n"


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
async def test_random_bytes(quick: ServerProcess):
    chance = random.Random(3)
    for _ in range(25):
        async with raw(quick) as client:
            for _ in range(5):
                if chance.random() < 0.5:
                    noise = chance.randbytes(chance.randrange(1, 400))
                else:
                    kind = chance.choice([Kind.START, Kind.STDIN, Kind.CONTROL, Kind.ATTACH])
                    noise = wire.encode(kind, chance.randrange(3), chance.randbytes(30))
                with contextlib.suppress(ConnectionError):
                    await client.ws.send_bytes(noise)
    assert quick.request("GET", "/v1/health")[0] == 200
    assert eventually(lambda: is_idle(quick))


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
async def test_an_endless_start_is_refused(quick: ServerProcess):
    chunk = bytes(wire.MAX_CHUNK)
    async with raw(quick) as client:
        with contextlib.suppress(ConnectionError):
            for at in range(0, MAX_START + len(chunk), len(chunk)):
                payload = struct.pack(">IB", at, 0) + chunk
                await client.ws.send_bytes(wire.encode(Kind.START, 1, payload))
        async for _ in client.ws:
            pass
        assert client.ws.closed
    assert eventually(lambda: quick.metric("sandbox_buffer_bytes") == 0)


@pytest.mark.threat(105, 123)
@pytest.mark.spec("I3")
async def test_a_client_that_never_reads(quick: ServerProcess):
    """Many runs with much output and no reader: the kept output stays within its limit."""
    resident = _resident(quick.pid)
    async with raw(quick) as client:
        client.ws._response.connection.transport.pause_reading()
        for run in range(20):
            await client.ws.send_bytes(start_of(run, "head -c 100000000 /dev/zero", stdout=True))
        most = 20 * (WINDOW + ONE_READ)
        assert eventually(lambda: quick.metric("sandbox_buffer_bytes") > 0)
        await asyncio.sleep(1.0)  # A buffer without a limit would go on growing.
        assert 0 < quick.metric("sandbox_buffer_bytes") < most
        assert _resident(quick.pid) - resident < most + 50 * MIB
        assert (await _exec(quick, "echo fine")) == "fine\n"
        client.ws._response.connection.transport.abort()
    assert eventually(lambda: is_idle(quick))


async def _exec(server: ServerProcess, cmd: str) -> str:
    async with remote(server) as session:
        return (await session.exec(cmd)).stdout


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.spec("I3")
async def test_the_shared_buffer_limit_is_enforced():
    with ServerProcess("--max-buffer-mib", "4") as server:
        async with remote(server) as session:
            runs = [await session.run("head -c 3000000 /dev/zero", stdout=True) for _ in range(16)]
            await asyncio.sleep(0.5)
            # Late runs still get a smaller share, and all of them end.
            most = 4 * MIB + 16 * (MIN_STREAM_BYTES + ONE_READ)
            assert server.metric("sandbox_buffer_bytes") < most
            for run in runs:
                assert len((await run.communicate())[0]) == 3_000_000


@pytest.mark.spec("I3")
async def test_another_protocol_version_is_reported(quick: ServerProcess):
    name = os.urandom(16).hex()
    assert quick.request("PUT", f"/v1/sessions/{name}", b"{}")[0] == 200
    status, body = quick.request(
        "GET",
        f"/v1/sessions/{name}/connect",
        Connection="Upgrade",
        Upgrade="websocket",
        **{
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Protocol": "union-sandbox.99",
        },
    )
    assert json.loads(body)["error"]["code"] == "version", status
    assert b"union-sandbox.1" in body
    assert quick.request("GET", f"/v1/sessions/{name}/connect")[0] == 400
    quick.request("DELETE", f"/v1/sessions/{name}")


BODIES = {
    "not JSON": (b"{", "malformed"),
    "a list": (b"[]", "malformed"),
    "unknown field": (b'{"user": "root"}', "malformed"),
    "a wrong type": (b'{"timeout_s": "soon"}', "usage"),
    "too large": (b'{"env": "' + b"x" * (5 * MIB) + b'"}', "too-large"),
    "nested": (b'{"env":' * 100_000, "malformed"),
}


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
@pytest.mark.parametrize("case", BODIES)
def test_an_invalid_body_is_refused_with_a_code(quick: ServerProcess, case: str):
    body, code = BODIES[case]
    path = f"/v1/sessions/{os.urandom(16).hex()}"
    try:
        status, answer = quick.request("PUT", path, body)
    except ConnectionError:
        assert case == "too large"  # it need not listen to the end
        return
    assert status in {400, 413}
    assert json.loads(answer)["error"]["code"] == code
    assert is_idle(quick)


@pytest.mark.threat(123)
@pytest.mark.spec("I3")
def test_a_request_that_is_not_http(quick: ServerProcess):
    for noise in (b"\x16\x03\x01\x02", b"GET\r\n\r\n", b"A" * 70_000, b"GET / HTTP/1.1\r\n" * 9999):
        sock = socket.create_connection(quick.address, timeout=10)
        with sock, contextlib.suppress(ConnectionError):
            sock.sendall(noise + b"\r\n\r\n")
            assert b" 200 " not in sock.recv(4096)
    assert quick.request("GET", "/v1/health")[0] == 200


@pytest.mark.threat(124)
@pytest.mark.spec("I3")
@pytest.mark.slow
def test_a_thousand_silent_connections():
    with ServerProcess("--max-connections", "100") as server, contextlib.ExitStack() as stack:
        begun = [
            stack.enter_context(socket.create_connection(server.address, timeout=10))
            for _ in range(1000)
        ]
        for number, sock in enumerate(begun):
            with contextlib.suppress(OSError):
                if number % 2:
                    sock.sendall(b"GET /v1/health HTTP/1.1\r\nHost: loc")
        assert server.request("GET", "/v1/health")[0] == 200
        assert server.metric("sandbox_connections") <= 101
        assert server.metric("sandbox_connections_refused_total") >= 890
        assert server.metric("sandbox_max_resident_bytes") < 200 * MIB
        path = f"/v1/sessions/{os.urandom(16).hex()}"
        assert server.request("PUT", path, b"{}")[0] == 200
        status, body = server.request("POST", f"{path}/runs", b"echo fine")
        assert status == 200
        assert b"fine" in body


@pytest.mark.threat(124)
@pytest.mark.spec("I3")
def test_a_slow_request_times_out():
    with ServerProcess("--header-timeout", "0.5") as server:
        with socket.create_connection(server.address, timeout=10) as sock:
            began = time.monotonic()
            sock.sendall(b"GET /v1/health HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                assert sock.recv(100) == b""
            assert time.monotonic() - began < SOON_S
        assert server.metric("sandbox_connections_refused_total") == 1


@pytest.mark.threat(123)
@pytest.mark.spec("I3", "E1")
async def test_an_aborted_upload_leaves_nothing(quick: ServerProcess):
    async with remote(quick, lazy=False) as session:
        name = session._transport.name  # type: ignore[union-attr]
        for framing in ("Content-Length: 1000000", "Transfer-Encoding: chunked"):
            with socket.create_connection(quick.address, timeout=10) as sock:
                sock.sendall(
                    f"PUT /v1/sessions/{name}/file?path=half HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {quick.token}\r\n{framing}\r\n\r\n".encode()
                    + b"3e8\r\n"
                    + b"x" * 1000
                )
                await asyncio.sleep(0.2)
        host = quick.host_dir(name)
        assert eventually(lambda: set(os.listdir(host)) <= {".sandbox-venv"}), os.listdir(host)
