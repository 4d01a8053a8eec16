"""RemoteStdin: the window, the end-of-file and the callers that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from union.sandbox._core.isolation import Isolation
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import MAX_CHUNK, STDIN_WINDOW, Taken, WireError
from union.sandbox.remote._run import RemoteRun
from union.sandbox.remote._stdin import RemoteStdin

WITHIN_S = 10


class Sent:
    def __init__(self) -> None:
        self.data = b""
        self.largest = 0
        self.eofs = 0
        self.stdin = RemoteStdin(self.send, self.send_eof)

    def send(self, data: bytes) -> None:
        assert not self.eofs
        self.data += data
        self.largest = max(self.largest, len(data))

    def send_eof(self) -> None:
        self.eofs += 1


def taken(stdin: int, *, broken: bool = False) -> Taken:
    return Taken(number=0, stdin=stdin, broken=broken)


def test_the_window_limits_the_bytes_in_flight_and_loses_none():
    sent = Sent()
    data = bytes(range(256)) * ((3 * STDIN_WINDOW) // 256)
    sent.stdin.feed(data)
    sent.stdin.close()
    assert STDIN_WINDOW <= len(sent.data) < STDIN_WINDOW + MAX_CHUNK
    while not sent.eofs:
        before = len(sent.data)
        sent.stdin.on_taken(taken(before))
        assert len(sent.data) > before or sent.eofs
        assert len(sent.data) - before <= STDIN_WINDOW + MAX_CHUNK
    assert (sent.data, sent.eofs) == (data, 1)
    assert sent.largest <= MAX_CHUNK


def test_the_end_of_file_is_sent_once():
    sent = Sent()
    sent.stdin.close()
    assert sent.eofs == 1
    sent.stdin.on_taken(taken(0))
    assert sent.eofs == 1


@pytest.mark.parametrize("fed", [0, 10])
def test_a_confirmation_of_more_than_was_sent_is_a_protocol_error(fed):
    sent = Sent()
    sent.stdin.feed(bytes(fed))
    sent.stdin.on_taken(taken(fed))
    with pytest.raises(WireError, match="more than was sent"):
        sent.stdin.on_taken(taken(fed + 1))


async def test_drain_waits_for_the_confirmation():
    sent = Sent()
    await sent.stdin.drain()
    sent.stdin.feed(b"0123456789")
    waiting = asyncio.create_task(sent.stdin.drain())
    await asyncio.sleep(0)
    sent.stdin.on_taken(taken(9))
    await asyncio.sleep(0)
    assert not waiting.done()
    sent.stdin.on_taken(taken(10))
    async with asyncio.timeout(WITHIN_S):
        await waiting


@pytest.mark.parametrize("how", ["broken", "ended"])
async def test_a_stdin_without_a_reader_is_a_broken_pipe(how):
    sent = Sent()
    sent.stdin.feed(bytes(STDIN_WINDOW + MAX_CHUNK))
    waiting = asyncio.create_task(sent.stdin.drain())
    await asyncio.sleep(0)
    if how == "broken":
        sent.stdin.on_taken(taken(0, broken=True))
    else:
        sent.stdin.end()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(BrokenPipeError):
            await waiting
    before = len(sent.data)
    sent.stdin.feed(b"more")
    assert len(sent.data) == before
    with pytest.raises(BrokenPipeError):
        await sent.stdin.drain()


async def test_a_stdin_that_breaks_before_the_first_write_drops_what_follows():
    sent = Sent()
    sent.stdin.on_taken(taken(0, broken=True))
    sent.stdin.feed(b"late")
    assert sent.data == b""
    with pytest.raises(BrokenPipeError):
        await sent.stdin.drain()


class Connection:
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)


def run_over(connection: Any) -> RemoteRun:
    sink: Any = None  # No event and no output arrives.
    return RemoteRun(
        1, b"body", sink, connection=connection, isolation=Isolation(backend="userns"), fds=set()
    )


def receive(run: RemoteRun, value: Taken) -> None:
    for frame in wire.decode(wire.encode_taken(run.number, value)):
        run.receive(frame)


async def test_a_run_remembers_that_its_stdin_broke_before_the_first_write():
    connection = Connection()
    run = run_over(connection)
    receive(run, taken(0, broken=True))
    run.feed_stdin(b"late")
    assert connection.frames == []
    with pytest.raises(BrokenPipeError):
        await run.drain_stdin()

    control = run_over(connection)
    receive(control, taken(0))
    control.feed_stdin(b"in time")
    assert len(connection.frames) == 1


async def test_a_run_without_stdin_refuses_a_confirmation_of_some():
    with pytest.raises(WireError, match="more than was sent"):
        receive(run_over(Connection()), taken(1))
