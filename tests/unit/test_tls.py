from __future__ import annotations

import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from union.sandbox._core.tls import TlsFormatError, looks_like_tls, read_hello


def greeting(name):
    """What a real client sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_the_name_in_a_real_greeting():
    data = greeting("www.example.com")
    assert looks_like_tls(data)
    assert read_hello(data).server_name == "www.example.com"


def test_a_greeting_without_a_name():
    assert read_hello(greeting(None)).server_name is None


def test_a_greeting_is_incomplete_until_its_last_byte():
    data = greeting("www.example.com")
    assert all(read_hello(data[:size]) is None for size in range(len(data)))


def test_a_greeting_cut_over_records_is_joined():
    data = greeting("www.example.com")
    body = data[5:]
    for size, fine in ((len(body) // 20, True), (1, False)):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        wire = b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in pieces)
        if fine:
            assert read_hello(wire).server_name == "www.example.com"
        else:
            with pytest.raises(TlsFormatError, match="pieces"):
                read_hello(wire)


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
def test_malformed_greetings(data):
    with pytest.raises(TlsFormatError):
        read_hello(data)


def test_two_names_are_refused():
    data = greeting("www.example.com")
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
        read_hello(record)


def test_other_protocols_do_not_look_like_it():
    assert not looks_like_tls(b"GET / HTTP/1.1")
    assert not looks_like_tls(b"SSH-2.0-x")
    assert not looks_like_tls(b"\x16\x01")
    assert not looks_like_tls(b"")
    assert looks_like_tls(b"\x16")


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_a_greeting_incomplete_or_a_format_error(tail):
    try:
        read_hello(b"\x16\x03\x01" + tail)
    except TlsFormatError:
        return
