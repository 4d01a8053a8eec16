"""Responses of the host of an Http entry: ambiguous, truncated, or another protocol."""

from __future__ import annotations

import asyncio

import pytest
from tests.net.harness import read_all
from tests.net.https_stub import HOST, TOKEN, gate, ok
from tests.net.test_interception import eventually, status


async def test_a_websocket_needs_permission(monkeypatch):
    async def switch(reader, writer):
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n"
        )
        while data := await reader.read(100):
            writer.write(data + TOKEN.encode() + b"s")
            await writer.drain()
        return False

    fields = (("Upgrade", "websocket"), ("Sec-WebSocket-Extensions", "permessage-deflate"))
    request = "GET /ws HTTP/1.1\r\nHost: {}:{}\r\nConnection: Upgrade\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in fields
    )
    async with gate(monkeypatch) as g:
        g.stub.respond = lambda seen: switch if seen.values("upgrade") else ok(b"no")
        assert b"101" not in await g.get("/ws", *fields)
    async with gate(monkeypatch, websockets=True) as g:
        g.stub.respond = lambda _: switch
        reader, writer = await g.connect()
        writer.write((request.format(HOST, g.stub.port) + "\r\n").encode())
        async with asyncio.timeout(40):
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            # The last byte could begin the secret: it comes all the same.
            assert await reader.readexactly(len(TOKEN) + 1) == g.token.placeholder.encode() + b"s"
        writer.close()
        (seen,) = g.stub.seen
        assert seen.value("authorization") == f"Bearer {TOKEN}"
        assert not seen.values("sec-websocket-extensions")


async def test_a_switch_without_a_request_is_an_error(monkeypatch):
    async with gate(monkeypatch) as g:
        g.stub.respond = lambda _: b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
        assert status(await g.get()) == 502


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 17,
    ],
)
async def test_an_ambiguous_response_is_not_passed_on(monkeypatch, response):
    async with gate(monkeypatch) as g:
        g.stub.respond = lambda _: response
        answer = await g.get()
        assert status(answer.rpartition(b"HTTP/1.1 100 \r\n\r\n")[2] or answer) in {100, 502}
        assert b"abcd" not in answer


async def test_bytes_after_a_response_are_not_the_next_response(monkeypatch):
    """A body after 204 must not be read as the response to the next request."""
    async with gate(monkeypatch) as g:
        smuggled = b"HTTP/1.1 204 No Content\r\n\r\n" + ok(b"smuggled")
        g.stub.respond = lambda seen: smuggled if seen.target == "/one" else ok(b"real")
        host = f"{HOST}:{g.stub.port}"
        reader, writer = await g.connect()
        async with asyncio.timeout(40):
            writer.write(f"GET /one HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(f"GET /two HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = await read_all(reader)
        writer.close()
        assert answer.endswith(b"real")
        assert b"smuggled" not in answer


async def test_a_truncated_response_is_reset(monkeypatch):
    async with gate(monkeypatch) as g:

        def respond(seen):
            async def write(reader, writer):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart")
                await writer.drain()
                return False

            return write

        g.stub.respond = respond
        response = await g.get()
        assert b"200 OK" in response
        await eventually(lambda: g.requests)
        assert g.requests[0].error
