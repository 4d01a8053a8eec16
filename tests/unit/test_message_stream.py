"""A line: whole messages in both directions, signs of life, and an end that both sides see."""

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
    """A line whose other end is the test's."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    line = await SocketStream.from_socket(ours)
    yield line, theirs
    theirs.close()
    await line.close()


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

    async def talk(line: SocketStream) -> int:
        sending = asyncio.create_task(line.send((data,)))
        found = len(await anext(line))
        assert await sending
        return found

    assert await asyncio.gather(talk(one), talk(other)) == [MAX_MESSAGE, MAX_MESSAGE]


async def test_a_message_out_of_measure_is_refused_before_it_is_read(bare):
    line, theirs = bare
    theirs.send((MAX_MESSAGE + 1).to_bytes(4))
    with pytest.raises(WireError):
        await anext(line)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\5abc"])
async def test_what_is_cut_off_is_the_end_and_no_message(bare, data):
    line, theirs = bare
    theirs.send(data)
    theirs.shutdown(socket.SHUT_WR)
    assert [message async for message in line] == []


async def test_what_nobody_takes_is_told(ends):
    one, other = ends
    await other.close()
    assert [message async for message in one] == []
    await one.close()
    assert not await one.send((b"x",))


async def test_who_is_asked_answers(bare):
    line, theirs = bare
    theirs.send(bytes(4))
    theirs.send(b"\0\0\0\1x")
    assert await anext(line) == b"x"
    assert theirs.recv(100) == bytes(4)


async def test_silence_is_the_end_for_who_asks(monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._SECOND_CHANCE_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        line = await SocketStream.from_socket(ours, ping_every_s=0.05)
        async with asyncio.timeout(10):
            assert [message async for message in line] == []
        assert "does not answer" in line.close_reason
        await line.close()


async def test_answers_keep_it_up():
    ours, theirs = socket.socketpair()
    line, other = (
        await SocketStream.from_socket(ours, ping_every_s=0.05),
        await SocketStream.from_socket(theirs),
    )
    answering = asyncio.create_task(anext(other, b"nothing"))
    reading = asyncio.create_task(anext(line, b"nothing"))
    await asyncio.sleep(0.5)
    assert not reading.done()
    assert not answering.done()
    await other.send((b"late",))
    assert await reading == b"late"
    await line.close()
    assert await answering == b"nothing"
    await other.close()


async def test_who_was_busy_does_not_blame_the_other_side(monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._SECOND_CHANCE_S", 0.3)
    ours, theirs = socket.socketpair()
    line, other = (
        await SocketStream.from_socket(ours, ping_every_s=0.1),
        await SocketStream.from_socket(theirs),
    )
    answering = asyncio.create_task(anext(other, b"nothing"))
    reading = asyncio.create_task(anext(line, b"nothing"))
    await asyncio.sleep(0.12)  # it has asked
    time.sleep(0.5)  # and nobody comes to read the answer
    await asyncio.sleep(0.3)
    assert not reading.done()
    await asyncio.gather(line.close(), other.close())
    await asyncio.gather(reading, answering)


async def test_a_side_that_takes_nothing_does_not_hold_up_the_end(bare, monkeypatch):
    monkeypatch.setattr("union.sandbox._wire.message_stream._CLOSE_S", 0.1)
    line, _ = bare
    sending = asyncio.create_task(line.send((bytes(MAX_MESSAGE),)))
    await asyncio.sleep(0.05)
    assert not sending.done()
    async with asyncio.timeout(10):
        await line.close()
        assert not await sending
