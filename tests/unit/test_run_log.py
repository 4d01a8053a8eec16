"""The run log: every byte once and in order, however often the connection breaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from union.sandbox._wire.frames import MAX_CHUNK, Offsets, WireError
from union.sandbox._wire.run_log import EventLog, RunLog, StreamLog


class Client:
    """A client that receives pieces and may lose its connection at any moment."""

    def __init__(self) -> None:
        self.data = b""

    def take(self, offset: int, piece: bytes) -> None:
        assert offset <= len(self.data)
        self.data += piece[len(self.data) - offset :]


STEPS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.sampled_from(["send", "lose", "ack", "back"]),
        st.integers(20_000, 40_000).map(lambda n: bytes([n % 251]) * n),
    ),
    max_size=60,
)


@pytest.mark.spec("I2")
@settings(max_examples=200)
@given(STEPS, st.integers(1, 50_000))
def test_nothing_is_lost_or_duplicated(steps, budget):
    log, client, whole = StreamLog(), Client(), b""
    for step in steps:
        if isinstance(step, bytes):
            log.append(step)
            whole += step
        elif step == "send":
            for offset, piece in log.unsent(budget):
                client.take(offset, piece)
        elif step == "lose":
            for _ in log.unsent(budget):
                pass
            log.rewind(len(client.data))
        elif step == "ack":
            log.ack(len(client.data))
        else:
            log.rewind(len(client.data))
    while log.has_more:
        for offset, piece in log.unsent(budget):
            client.take(offset, piece)
    assert client.data == whole
    log.ack(len(whole))
    assert log.held == 0


def test_pieces_fit_into_a_frame():
    log = StreamLog()
    log.append(bytes(3 * MAX_CHUNK + 5))
    found = list(log.unsent(10 * MAX_CHUNK))
    assert [offset for offset, _ in found] == [0, MAX_CHUNK, 2 * MAX_CHUNK, 3 * MAX_CHUNK]
    assert max(len(piece) for _, piece in found) == MAX_CHUNK


@pytest.mark.spec("I3")
def test_many_small_pieces_cost_little_memory():
    log = StreamLog()
    for _ in range(100_000):
        log.append(b"x")
    assert len(log._kept) <= 8
    for _ in log.unsent(1 << 30):
        pass
    for _ in range(1000):
        log.append(b"y")
        list(log.unsent(10))
    assert log.held >= 1000 * 64


def test_a_client_cannot_acknowledge_unsent_data():
    log = StreamLog()
    log.append(b"12345")
    with pytest.raises(WireError):
        log.ack(1)
    list(log.unsent(100))
    log.ack(3)
    for offset in (2, 6):
        with pytest.raises(WireError):
            log.rewind(offset)
    log.rewind(4)
    assert [(o, p) for o, p in log.unsent(100)] == [(4, b"5")]


def test_events_are_sent_again_after_a_reconnect():
    log = EventLog()
    for event in (b"a", b"b", b"c"):
        log.append(event)
    assert list(log.unsent(2)) == [(0, b"a"), (1, b"b")]
    log.ack(1)
    log.rewind(1)
    assert list(log.unsent(100)) == [(1, b"b"), (2, b"c")]
    with pytest.raises(WireError):
        log.ack(4)
    with pytest.raises(WireError):
        log.rewind(0)


def test_a_run_is_over_when_the_client_has_all_of_it():
    run = RunLog({1: StreamLog()})
    run.streams[1].append(b"out")
    run.events.append(b"exited")
    run.ended = run.streams[1].closed = True
    assert run.has_more
    list(run.streams[1].unsent(10))
    list(run.events.unsent(10))
    assert not run.is_over
    run.ack(Offsets(3, 0, 0))
    assert not run.is_over
    run.ack(Offsets(3, 0, 1))
    assert run.is_over
