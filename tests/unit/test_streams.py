from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from union.sandbox._core.events import Exited, Started, Usage
from union.sandbox._session import streams
from union.sandbox._session.streams import Collector, StreamBuffer
from union.sandbox.constants import MAX_LINE_BYTES, UNREAD_STREAM_BYTES
from union.sandbox.testing import ScriptedTransport, scripted_session

MIB = 1024 * 1024


def lines_of(chunks: list[bytes]) -> list[str]:
    async def collect() -> list[str]:
        buffer = StreamBuffer(lambda: None)
        for chunk in chunks:
            buffer.feed(chunk)
        buffer.feed_eof()
        lines = []
        while (line := await buffer.read_line(MAX_LINE_BYTES)) is not None:
            lines.append(line)
        return lines

    return asyncio.run(collect())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({p % (len(data) + 1) for p in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


@settings(max_examples=150)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"))),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.lists(st.integers(0, 10_000)),
)
def test_lines_do_not_depend_on_where_chunks_are_cut(texts, end, last_has_end, places):
    data = end.join(texts) + (end if last_has_end and texts else "")
    expected = texts if last_has_end or not texts or texts[-1] else texts[:-1]
    assert lines_of(cut(data.encode(), places)) == expected


@settings(max_examples=150)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_any_bytes_give_the_same_lines_however_they_arrive(data, places):
    assert lines_of(cut(data, places)) == lines_of([data] if data else [])


@pytest.mark.parametrize(
    "size", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES + 2]
)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_long_line_comes_in_pieces(size, end):
    data = b"x" * size + end + (b"next\n" if end else b"")
    pieces = lines_of(cut(data, list(range(0, len(data), 200_000))))
    if end:
        assert pieces.pop() == "next"
    assert "".join(pieces) == "x" * size
    assert max(map(len, pieces)) <= MAX_LINE_BYTES + 1
    assert len(pieces) == -(-size // MAX_LINE_BYTES), "no empty piece stands for a line end"


def test_pieces_are_never_cut_in_a_character():
    text = "€" * MAX_LINE_BYTES
    pieces = lines_of(cut(text.encode(), list(range(0, 3 * MAX_LINE_BYTES, 250_001))))
    assert "".join(pieces) == text


async def test_a_buffer_says_when_it_is_full_and_once_when_there_is_room():
    calls = []
    buffer = StreamBuffer(lambda: calls.append(1))
    assert buffer.feed(bytes(MIB - 1))
    assert not buffer.feed(b"x")
    assert not calls
    await buffer.read()
    assert calls == [1]
    await buffer.read()
    assert calls == [1]


async def test_widening_makes_room_and_narrowing_takes_it():
    calls = []
    buffer = StreamBuffer(lambda: calls.append(1))
    assert not buffer.feed(bytes(MIB))
    buffer.widen()
    assert calls == [1]
    assert buffer.feed(bytes(UNREAD_STREAM_BYTES - MIB - 1))
    assert not buffer.feed(b"x")
    buffer.narrow()
    await buffer.read()
    assert calls == [1], "still over the small limit"
    await buffer.read()
    assert calls == [1, 1]


async def test_a_reader_waits_for_data_and_for_the_end():
    buffer = StreamBuffer(lambda: None)
    reading = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    assert not reading.done()
    buffer.feed(b"x")
    assert await reading == b"x"
    ending = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    buffer.feed_eof()
    assert await ending == b""
    assert await buffer.read() == b""


async def test_a_cancelled_reader_loses_nothing():
    buffer = StreamBuffer(lambda: None)
    reading = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    buffer.feed(b"kept")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await buffer.read() == b"kept"


async def test_a_reader_cancelled_inside_a_line_loses_nothing():
    buffer = StreamBuffer(lambda: None)
    buffer.feed(b"par")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.read_line(MAX_LINE_BYTES), 0.02)
    buffer.feed(b"tial\nrest")
    buffer.feed_eof()
    assert await buffer.read_line(MAX_LINE_BYTES) == "partial"
    assert await buffer.read() == b"rest"


async def test_lines_and_chunks_may_be_read_in_turn():
    buffer = StreamBuffer(lambda: None)
    buffer.feed(b"a\nb\nc")
    assert await buffer.read_line(MAX_LINE_BYTES) == "a"
    assert await buffer.read() == b"b\nc"
    buffer.feed_eof()
    assert await buffer.read_line(MAX_LINE_BYTES) is None


async def test_two_readers_of_one_stream_are_an_error():
    buffer = StreamBuffer(lambda: None)
    first = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await buffer.read()
    buffer.feed(b"x")
    assert await first == b"x"


@given(st.lists(st.binary(max_size=20)), st.integers(0, 60))
def test_a_collector_keeps_the_beginning_and_knows_of_the_rest(chunks, cap):
    collector = Collector(cap)
    for chunk in chunks:
        collector.add(chunk)
    whole = b"".join(chunks)
    assert collector.value() == whole[:cap]
    assert collector.truncated == (len(whole) > cap)
    assert collector.value() == whole[:cap]


def test_the_read_ahead_is_small():
    assert streams._READ_AHEAD <= 4 * MIB


class Held(ScriptedTransport):
    """Delivers nothing by itself: the test acts as the transport."""

    sink = None

    async def start(self, spec, sink):
        self.sink = sink
        sink.event(Started(2))
        return await super().start(spec, Silent())


class Silent:
    """A sink that drops the output of the scripted command."""

    def event(self, event): ...

    def output(self, fd, data):
        return True

    def end_of_output(self, fd): ...


@pytest.mark.spec("D6")
async def test_communicate_keeps_the_order_of_buffered_and_new_output():
    transport = Held({"x": ""})
    async with scripted_session(transport) as sbx:
        proc = await sbx.run("x", stdout=True, stderr=True)
        for fd in (1, 2):
            transport.sink.output(fd, b"first ")
        reading = asyncio.create_task(proc.communicate())
        # Runs when communicate() has begun, and before anything was taken from the buffers.
        for fd in (1, 2):
            asyncio.get_running_loop().call_soon(transport.sink.output, fd, b"second")
        await asyncio.sleep(0.01)
        for fd in (1, 2):
            transport.sink.end_of_output(fd)
        transport.sink.event(Exited(0, "", Usage()))
        assert await reading == (b"first second", b"first second")
