"""SocketStream: whole messages in both directions, pings, and an end that both sides see."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import pytest

from union.sandbox._wire.frames import MAX_MESSAGE, WireError
from union.sandbox._wire.message_stream import SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.spec("I3")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[SocketStream, SocketStream]]:
    ours, theirs = socket.socketpair()
    one, other = await SocketStream.from_socket(ours), await SocketStream.from_socket(theirs)
    yield one, other
    await asyncio.gather(one.close(), other.close())


@pytest.fixture
async def bare() -> AsyncIterator[tuple[SocketStream, socket.socket]]:
    """Provide a stream whose other end is a socket of the test."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    stream = await SocketStream.from_socket(ours)
    yield stream, theirs
    theirs.close()
    await stream.close()


@pytest.mark.parametrize("size", [1, 65536, MAX_MESSAGE])
async def test_messages_arrive_whole_and_in_order(ends, size):
    one, other = ends

    async def send() -> None:
        for number in range(5):
            assert await one.send((bytes([number]), b"x" * (size - 2), b"y"[: size - 1]))

    sending = asyncio.create_task(send())
    for number in range(5):
        message = await anext(other)
        assert len(message) == size
        assert message[0] == number
    await sending


async def test_both_directions_at_once(ends):
    one, other = ends
    data = b"z" * MAX_MESSAGE

    async def exchange(stream: SocketStream) -> int:
        sending = asyncio.create_task(stream.send((data,)))
        found = len(await anext(stream))
        assert await sending
        return found

    assert await asyncio.gather(exchange(one), exchange(other)) == [MAX_MESSAGE, MAX_MESSAGE]


async def test_an_oversized_message_is_refused_before_it_is_read(bare):
    stream, theirs = bare
    theirs.send((MAX_MESSAGE + 1).to_bytes(4))
    with pytest.raises(WireError):
        await anext(stream)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\5abc"])
async def test_a_truncated_message_is_the_end_and_no_message(bare, data):
    stream, theirs = bare
    theirs.send(data)
    theirs.shutdown(socket.SHUT_WR)
    assert [message async for message in stream] == []


async def test_sending_to_a_closed_peer_is_reported(ends):
    one, other = ends
    await other.close()
    assert [message async for message in one] == []
    await one.close()
    assert not await one.send((b"x",))


async def test_a_ping_is_answered(bare):
    stream, theirs = bare
    theirs.send(bytes(4))
    theirs.send(b"\0\0\0\1x")
    assert await anext(stream) == b"x"
    assert theirs.recv(100) == bytes(4)


async def test_a_peer_that_answers_no_ping_ends_the_stream(monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._SECOND_CHANCE_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        stream = await SocketStream.from_socket(ours, ping_every_s=0.05)
        async with asyncio.timeout(40):
            assert [message async for message in stream] == []
        assert "does not answer" in stream.close_reason
        await stream.close()


async def test_answers_keep_the_stream_open():
    ours, theirs = socket.socketpair()
    stream, other = (
        await SocketStream.from_socket(ours, ping_every_s=0.05),
        await SocketStream.from_socket(theirs),
    )
    answering = asyncio.create_task(anext(other, b"nothing"))
    reading = asyncio.create_task(anext(stream, b"nothing"))
    await asyncio.sleep(0.5)
    assert not reading.done()
    assert not answering.done()
    await other.send((b"late",))
    assert await reading == b"late"
    await stream.close()
    assert await answering == b"nothing"
    await other.close()


async def test_a_busy_event_loop_does_not_end_the_stream(monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._SECOND_CHANCE_S", 0.3)
    ours, theirs = socket.socketpair()
    stream, other = (
        await SocketStream.from_socket(ours, ping_every_s=0.1),
        await SocketStream.from_socket(theirs),
    )
    answering = asyncio.create_task(anext(other, b"nothing"))
    reading = asyncio.create_task(anext(stream, b"nothing"))
    await asyncio.sleep(0.12)  # It has sent a ping.
    time.sleep(0.5)  # The event loop is blocked and does not read the reply.
    await asyncio.sleep(0.3)
    assert not reading.done()
    await asyncio.gather(stream.close(), other.close())
    await asyncio.gather(reading, answering)


async def test_a_peer_that_does_not_read_does_not_delay_close(bare, monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._CLOSE_S", 0.1)
    stream, _ = bare
    sending = asyncio.create_task(stream.send((bytes(MAX_MESSAGE),)))
    await asyncio.sleep(0.05)
    assert not sending.done()
    async with asyncio.timeout(40):
        await stream.close()
        assert not await sending
