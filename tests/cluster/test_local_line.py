"""The socket between an owner and its local server: the first result needs no HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.local import LONG_S, home_of, request, server_of
from tests.conftest import eventually

from union import sandbox as sb
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind, to_json
from union.sandbox._wire.message_stream import SocketStream
from union.sandbox.cluster._keys import session_name
from union.sandbox.remote._websocket import WebSocket

pytestmark = pytest.mark.spec("I4", "I8")


def has_loaded_http(pid: int) -> bool:
    return "/aiohttp/" in Path(f"/proc/{pid}/maps").read_text()


def stream_of(sbx: sb.SandboxSession) -> object:
    transport: Any = sbx._transport
    return transport._connection._stream


def cut(sbx: sb.SandboxSession) -> None:
    stream: Any = stream_of(sbx)
    stream._writer.transport.abort()


PROGRAM = """
import asyncio, json, sys
from union import sandbox as sb
async def main():
    async with await sb.session() as sbx:
        assert (await sbx.exec("echo hi")).stdout == "hi\\n"
        client = "aiohttp" in sys.modules
        server = "/aiohttp/" in open(f"/proc/{sbx._handle.pid}/maps").read()
        await sbx.put_bytes("a", b"x")
        assert await sbx.get_bytes("a") == b"x"
        print(json.dumps([client, server]))
asyncio.run(main())
"""


@pytest.mark.spec("A5")
def test_neither_side_imports_http_for_a_command():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=LONG_S,
    )
    assert json.loads(done.stdout) == [False, False]


async def test_an_http_request_imports_http_while_commands_continue():
    async with await sb.session() as sbx:
        proc = await sbx.run("while sleep 0.01; do echo .; done", stdout=True)
        assert not has_loaded_http(server_of(sbx))
        calls = [asyncio.to_thread(request, sbx, "GET", "/v1/health", token=None) for _ in range(8)]
        for status, payload in await asyncio.gather(*calls):
            assert (status, payload["status"]) == (200, "ok")
        assert has_loaded_http(server_of(sbx))
        assert isinstance(stream_of(sbx), SocketStream)
        proc.kill()
        await proc.wait()


@pytest.mark.parametrize(
    "change, code",
    [
        ({"token": "x" * 43}, "unauthorized"),
        ({"token": ""}, "unauthorized"),
        ({"session": "ab" * 16}, "session-lost"),
        ({"protocol": 2}, "version"),
    ],
)
async def test_the_socket_requires_the_same_credentials_as_http(change, code):
    async with await sb.session() as sbx:
        assert sbx._handle is not None
        sock = sbx._handle.take_socket()
        assert sock is not None
        stream = await SocketStream.from_socket(sock)
        opening = {
            "protocol": 1,
            "session": session_name(sbx.name),
            "token": sbx._handle.keys.owner,
        }
        await stream.send((to_json(opening | change),))
        async with asyncio.timeout(LONG_S):
            payload = json.loads(await anext(stream))
            assert payload["error"]["code"] == code
            assert [message async for message in stream] == []
        await stream.close()
        # The session still works without the socket.
        assert (await sbx.exec("echo hi")).stdout == "hi\n"
        assert isinstance(stream_of(sbx), WebSocket)


@pytest.mark.parametrize("opening", [b"{", b"[]", b'{"protocol":1}', b'{"protocol":1,"session":7}'])
async def test_a_malformed_first_message_ends_the_connection(opening):
    async with await sb.session() as sbx:
        assert sbx._handle is not None
        sock = sbx._handle.take_socket()
        assert sock is not None
        stream = await SocketStream.from_socket(sock)
        await stream.send((opening,))
        async with asyncio.timeout(LONG_S):
            assert [message async for message in stream] == []
        await stream.close()
        assert (await sbx.exec("echo hi")).stdout == "hi\n"


async def test_a_guest_token_cannot_end_the_session():
    async with await sb.session() as sbx:
        assert sbx._handle is not None
        sock = sbx._handle.take_socket()
        assert sock is not None
        stream = await SocketStream.from_socket(sock)
        opening = {"protocol": 1, "session": session_name(sbx.name), "token": sbx.access}
        await stream.send((to_json(opening),))
        async with asyncio.timeout(LONG_S):
            assert "error" not in json.loads(await anext(stream))
            await stream.send((wire.encode(Kind.CLOSE),))
            assert [message async for message in stream] == []
        await stream.close()
        assert (await sbx.exec("echo hi")).stdout == "hi\n"


@pytest.mark.spec("I3")
async def test_a_command_resumes_after_the_socket_breaks():
    async with await sb.session() as sbx:
        proc = await sbx.run("for i in $(seq 300); do echo $i; sleep 0.005; done", stdout=True)
        found = b""
        async for piece in proc.iter_stdout():
            if not found:
                cut(sbx)
            found += piece
        assert found.split() == [str(i).encode() for i in range(1, 301)]
        assert await proc.wait() == 0
        assert isinstance(stream_of(sbx), WebSocket)
        assert (await sbx.exec("echo hi")).stdout == "hi\n"


@pytest.mark.spec("I3")
async def test_a_hung_server_is_noticed_and_reconnected(monkeypatch):
    monkeypatch.setattr("union.sandbox.remote._attached._PING_EVERY_S", 0.2)
    async with await sb.session() as sbx:
        await sbx.put_bytes("a", b"x")
        stream = stream_of(sbx)
        pid = server_of(sbx)
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(LONG_S):
                while stream_of(sbx) is stream:
                    await asyncio.sleep(0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await sbx.exec("echo hi")).stdout == "hi\n"
        assert isinstance(stream_of(sbx), WebSocket)


async def test_large_transfers_in_both_directions():
    size = 20_000_000
    async with await sb.session() as sbx:
        many = [sbx.exec("wc -c", stdin=bytes(size)) for _ in range(2)]
        many += [sbx.exec("head -c 3000000 /dev/zero | tr '\\0' x") for _ in range(4)]
        done = await asyncio.gather(*many)
        assert [int(result.stdout) for result in done[:2]] == [size, size]
        assert {len(result.stdout) for result in done[2:]} == {3_000_000}
        assert isinstance(stream_of(sbx), SocketStream)


async def test_an_unused_socket_is_closed_with_its_session():
    before = set(os.listdir("/proc/self/fd"))
    sbx = await sb.session()
    await sbx
    async with asyncio.timeout(4):  # Closing must not wait for data on the socket.
        await sbx.close()
    assert eventually(lambda: not os.path.exists(home_of(sbx)), within_s=LONG_S)
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_sandboxed_code_does_not_inherit_the_socket():
    async with await sb.session() as sbx:
        listed = await sbx.exec("ls -l /proc/self/fd")
        assert "socket:" not in listed.stdout
