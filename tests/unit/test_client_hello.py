from __future__ import annotations

import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from union.sandbox._codecs.client_hello import (
    ClientHelloTracker,
    TlsFormatError,
    looks_like_tls,
    parse_client_hello,
)


def client_hello(name):
    """Return the ClientHello of a real client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_the_server_name_of_a_real_client_hello():
    data = client_hello("www.example.com")
    assert looks_like_tls(data)
    assert parse_client_hello(data).server_name == "www.example.com"


def test_a_client_hello_without_a_server_name():
    assert parse_client_hello(client_hello(None)).server_name is None


def test_a_client_hello_is_incomplete_until_its_last_byte():
    data = client_hello("www.example.com")
    assert all(parse_client_hello(data[:size]) is None for size in range(len(data)))


def test_a_client_hello_in_several_records_is_joined():
    data = client_hello("www.example.com")
    body = data[5:]
    for size, fine in ((len(body) // 20, True), (1, False)):
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        wire = b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in parts)
        if fine:
            assert parse_client_hello(wire).server_name == "www.example.com"
        else:
            with pytest.raises(TlsFormatError, match="spans more than 64 records"):
                parse_client_hello(wire)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x00",
        b"\x16\x02\x01\x00\x05aaaaa",
        b"\x16\x03\x01\x00\x05\x02\0\0\x01a",
        b"\x16\x03\x01\x00\x05\x01\0\0\x01a",
        b"\x16\x03\x01\xff\xff" + b"\x01\xff\xff\xff",
        b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff",
    ],
)
def test_malformed_client_hellos_are_refused(data):
    with pytest.raises(TlsFormatError):
        parse_client_hello(data)


def test_two_server_names_are_refused():
    data = client_hello("www.example.com")
    at = data.index(b"www.example.com") - 9
    extension = data[at : at + 9 + 15]
    hello = data[9:]
    head_length = at - 9
    doubled = bytearray(hello[:head_length] + extension + hello[head_length:])
    # Correct the three lengths that cover the doubled extension.
    position = 34
    position += 1 + doubled[position]
    position += 2 + int.from_bytes(doubled[position : position + 2], "big")
    position += 1 + doubled[position]
    total = int.from_bytes(doubled[position : position + 2], "big") + len(extension)
    doubled[position : position + 2] = total.to_bytes(2, "big")
    message = b"\x01" + len(doubled).to_bytes(3, "big") + bytes(doubled)
    record = b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message
    with pytest.raises(TlsFormatError, match="two"):
        parse_client_hello(record)


def test_other_protocols_do_not_look_like_tls():
    assert not looks_like_tls(b"GET / HTTP/1.1")
    assert not looks_like_tls(b"SSH-2.0-x")
    assert not looks_like_tls(b"")
    assert looks_like_tls(b"\x16\x10") is False
    assert looks_like_tls(b"\x17\x01") is False
    for undecided in (b"\x16", b"\x16\x01", b"\x16\x05\x01\x02\x00\x01\x00\x01\xfc"):
        assert looks_like_tls(undecided) is None


@pytest.mark.threat(163)
@pytest.mark.parametrize("kind", [0x14, 0x15, 0x17, 0x18])
def test_other_records_before_the_client_hello_are_refused(kind):
    for size in (1, 2, 7):
        record = bytes((kind, 3, 1, 0, 2, 1, 90))[:size]
        tracker = ClientHelloTracker()
        if size == 1:
            assert tracker.feed(record) == ()
            assert tracker.is_waiting
            record = b"\x03\x01"
        with pytest.raises(TlsFormatError):
            tracker.feed(record + b"\0\x02\x01\x5a")


@given(st.lists(st.binary(min_size=1, max_size=600), max_size=6))
@settings(max_examples=200)
def test_arbitrary_bytes_leave_a_consistent_state(parts):
    tracker = ClientHelloTracker()
    try:
        for part in parts:
            tracker.feed(part)
            tracker.feed_server(part)
    except TlsFormatError:
        return
    assert not (tracker.is_over and tracker.is_waiting)


@pytest.mark.parametrize("step", [1, 3, 100, 5000])
def test_a_partial_client_hello_is_held_back(step):
    data = client_hello("www.example.com")
    tracker = ClientHelloTracker()
    names = ()
    for at in range(0, len(data), step):
        assert not names
        names = tracker.feed(data[at : at + step])
        assert tracker.is_waiting == (at + step < len(data))
    assert names == ("www.example.com",)
    assert not tracker.is_over, "a second one may follow"
    tracker.feed_server(b"\x16\x03\x03\x00\x7a\x02\x00\x00\x76\x03\x03" + bytes(32))
    assert tracker.feed(b"\x14\x03\x03\x00\x01\x01") == ()
    assert tracker.is_over


@given(st.binary(max_size=120))
def test_arbitrary_bytes_raise_only_format_errors(tail):
    try:
        parse_client_hello(b"\x16\x03\x01" + tail)
    except TlsFormatError:
        return
