"""Records of runs for the console: the last output, within limits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._core.events import Exited, Usage
from union.sandbox._core.spec import RunSpec
from union.sandbox.server._records import (
    _PIECE_COST,
    History,
    RunRecord,
    SessionRecord,
    Tail,
)

EXITED = Exited(0, "", Usage(cpu_user_s=1.0, max_rss_bytes=5))


def joined(pieces: list[tuple[int, bytes]], fd: int) -> bytes:
    return b"".join(data for found, data in pieces if found == fd)


@given(
    writes=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=60),
    max_bytes=st.integers(200, 2000),
    at=st.floats(0, 1),
)
def test_a_tail_holds_the_last_output(writes, max_bytes, at):
    tail = Tail(max_bytes)
    everything = b""
    streams: list[int] = []
    for fd, data in writes:
        tail.append(fd, data)
        everything += data
        streams += [fd] * len(data)
    assert tail.end == len(everything)
    offset = int(at * tail.end)
    skipped, pieces = tail.since(offset)
    data = b"".join(piece for _, piece in pieces)
    assert data == everything[offset + skipped :]
    assert [fd for fd, piece in pieces for _ in piece] == streams[offset + skipped :]
    if tail.end + _PIECE_COST * len(writes) <= max_bytes:
        assert skipped == 0


@pytest.mark.parametrize("size", [1, 100, 4096, 65536, 200_000, 1_000_000])
def test_a_tail_is_bounded(size: int):
    max_bytes = 64 * 1024
    tail = Tail(max_bytes)
    for number in range(2_000_000 // size if size > 50 else 40_000):
        tail.append(1 + number % 2, b"x" * size)
        assert tail.held <= max_bytes * 5 // 4
    _, pieces = tail.since(0)
    assert sum(len(data) for _, data in pieces) <= max_bytes * 5 // 4
    assert len(pieces) <= max_bytes * 5 // 4 // _PIECE_COST


def test_small_writes_are_joined():
    tail = Tail()
    for _ in range(10_000):
        tail.append(1, b"x")
    _, pieces = tail.since(0)
    assert joined(pieces, 1) == b"x" * 10_000
    assert len(pieces) < 5


def ended_run(session: SessionRecord, output: bytes = b"") -> RunRecord:
    record = RunRecord(RunSpec(kind="shell", text="true"))
    session.begin(record)
    if output:
        record.output(1, output)
    record.end_of_output(1)
    record.end_of_output(2)
    record.ended(b'{"exited":{}}', EXITED)
    return record


def test_the_oldest_ended_runs_are_removed_first():
    history = History(max_bytes=1 << 30, max_records=10)
    one, other = SessionRecord(history), SessionRecord(history)
    live = RunRecord(RunSpec(kind="shell", text="sleep 1"))
    one.begin(live)
    for _ in range(12):
        ended_run(one)
        ended_run(other)
    assert list(one.runs) == [1, 9, 10, 11, 12, 13]
    assert list(other.runs) == [8, 9, 10, 11, 12]
    assert (one.count, one.running, one.cpu_s, one.peak_bytes) == (13, 1, 12.0, 5)


def test_large_records_reduce_the_count_and_close_releases_them():
    history = History(max_bytes=1024 * 1024, max_records=1000)
    session = SessionRecord(history)
    for _ in range(100):
        ended_run(session, b"x" * 60_000)
    assert 10 < len(session.runs) < 20
    assert 0 < history._held <= 1024 * 1024
    session.close()
    assert history._held == 0
    assert not history._ended


async def test_watchers_are_notified_of_output_and_of_the_end():
    session = SessionRecord(History())
    record = RunRecord(RunSpec(kind="shell", text="true"))
    session.begin(record)
    wake = asyncio.Event()
    record.watchers.add(wake)
    record.output(1, b"x")
    assert wake.is_set()
    wake.clear()
    assert not record.is_over
    session.close()
    assert wake.is_set()
    assert record.is_over
    assert record.described()["end"]["failed"]["code"] == "closed"


@pytest.mark.parametrize(
    "spec, shown",
    [
        (RunSpec(kind="shell", text="echo hi"), "echo hi"),
        (RunSpec(kind="argv", argv=("echo", "a b", "$x")), "echo 'a b' '$x'"),
        (RunSpec(kind="python", text="x" * 1_000_000), "x" * 400 + "…"),
        (RunSpec(kind="argv", argv=("y" * 1_000_000,) * 100), "y" * 400 + "…"),
        (RunSpec(kind="shell", text="a\udcffb"), "a?b"),
    ],
)
def test_a_long_command_is_shortened(spec: RunSpec, shown: str):
    assert RunRecord(spec).described()["command"] == shown
