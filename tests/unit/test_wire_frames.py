"""Frames: encoding and decoding round trip; anything else is refused quickly."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import (
    MAX_CHUNK,
    MAX_MESSAGE,
    Frame,
    Kind,
    Offsets,
    Taken,
    WireError,
)

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
PARSERS = (
    wire.decode_output,
    wire.decode_numbered,
    wire.decode_offsets,
    wire.decode_taken,
    wire.decode_start,
)


def one(message: bytes) -> Frame:
    (frame,) = wire.decode(message)
    return frame


@pytest.mark.spec("I3")
@given(st.lists(st.tuples(st.sampled_from(Kind), U64, st.binary(max_size=200)), max_size=20))
def test_a_message_decodes_to_its_frames(frames):
    message = b"".join(wire.encode(*frame) for frame in frames)
    found = [(f.kind, f.run, bytes(f.payload)) for f in wire.decode(message)]
    assert found == frames


@pytest.mark.spec("I3")
@given(st.binary(max_size=4096))
def test_any_bytes_decode_or_are_refused(data):
    try:
        frames = list(wire.decode(data))
    except WireError:
        return
    assert b"".join(wire.encode(f.kind, f.run, bytes(f.payload)) for f in frames) == data


@pytest.mark.spec("I3")
@given(st.binary(max_size=64), st.sampled_from(PARSERS))
def test_any_payload_decodes_or_is_refused(data, parse):
    with contextlib.suppress(WireError):
        parse(memoryview(data))


@given(st.lists(st.tuples(U64, st.binary(max_size=50)), min_size=1, max_size=5), st.data())
def test_a_truncated_message_is_refused(frames, data):
    message = b"".join(wire.encode(Kind.STDIN, run, body) for run, body in frames)
    borders, at = {0}, 0
    for _, body in frames:
        at += 13 + len(body)
        borders.add(at)
    cut = data.draw(st.integers(0, len(message) - 1).filter(lambda n: n not in borders))
    with pytest.raises(WireError, match="truncated"):
        list(wire.decode(message[:cut]))


@pytest.mark.parametrize(
    "message",
    [
        b"\x00" * 13,
        b"\xff" + b"\x00" * 12,
        wire.encode(Kind.START, 1)[:-1],
        b"\x01" + b"\x00" * 8 + b"\xff\xff\xff\xff",
        bytes(MAX_MESSAGE + 1),
    ],
)
def test_invalid_frames(message):
    with pytest.raises(WireError):
        list(wire.decode(message))


@given(U64, st.sampled_from([1, 2]), U64, st.binary(max_size=300))
def test_output(run, fd, offset, data):
    frame = one(wire.encode_output_head(run, fd, offset, len(data)) + data)
    assert (frame.kind, frame.run) == (Kind.OUTPUT, run)
    assert wire.decode_output(frame.payload) == (fd, offset, data)


@given(U64, U64, U64, U32)
def test_offsets(run, out, err, events):
    frame = one(wire.encode_offsets(Kind.ACK, run, Offsets(out, err, events)))
    assert wire.decode_offsets(frame.payload) == Offsets(out, err, events)


@given(U64, U32, U64, st.booleans())
def test_taken(run, number, stdin, broken):
    frame = one(wire.encode_taken(run, Taken(number, stdin, broken)))
    assert wire.decode_taken(frame.payload) == Taken(number, stdin, broken)


@pytest.mark.parametrize("size", [0, 1, MAX_CHUNK - 1, MAX_CHUNK, MAX_CHUNK + 1, 3 * MAX_CHUNK])
def test_start_parts_reassemble(size):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    found = b""
    parts = [wire.decode_start(one(m).payload) for m in wire.encode_start(9, body)]
    for at, last, data in parts:
        assert at == len(found)
        assert last == (at + len(data) == size)
        found += data
    assert found == body
    assert [last for _, last, _ in parts].count(True) == 1


def test_too_large_a_payload():
    for parse in PARSERS:
        with pytest.raises(WireError):
            parse(memoryview(bytes(MAX_CHUNK + 100)))


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_json_round_trip(value):
    assert wire.parse_json(wire.to_json(value)) == value


def test_names_that_are_not_utf8_survive():
    name = b"raw\xff\xfe".decode("utf-8", "surrogateescape")
    assert wire.parse_json(wire.to_json({"path": name})) == {"path": name}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b"{", b'{"a":NaN}', b"\xff", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_invalid_json_objects(data):
    with pytest.raises(WireError):
        wire.parse_json(data)


def test_json_that_is_too_large():
    with pytest.raises(WireError, match="at most 10"):
        wire.parse_json(b'{"a":12345678}', max_bytes=10)
