from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._codecs import dns


def query(name=b"\x07example\x03com\0", *, kind=1, klass=1, flags=0x0100, extra=b"", counts=None):
    header = struct.pack(">HHHHHH", 0x1234, flags, *(counts or (1, 0, 0, 1 if extra else 0)))
    return header + name + struct.pack(">HH", kind, klass) + extra


OPT = struct.pack(">BHHIH", 0, 41, 1232, 0, 0)


def test_a_query_is_parsed_and_a_response_encoded():
    parsed = dns.parse_query(query(b"\x07eXample\x03com\0"))
    assert (parsed.name, parsed.kind, parsed.edns) == ("eXample.com", dns.A, False)
    answer = dns.encode_response(parsed, records=(bytes((198, 18, 0, 1)),))
    assert answer[:12] == struct.pack(">HHHHHH", 0x1234, 0x8180, 1, 1, 0, 0)
    # The question is echoed with its case: some clients vary the case as a cookie.
    assert answer[12:29] == b"\x07eXample\x03com\0\x00\x01\x00\x01"
    assert (
        answer[29:] == b"\xc0\x0c\x00\x01\x00\x01" + struct.pack(">IH", 60, 4) + b"\xc6\x12\0\x01"
    )


def test_a_refusal_carries_an_extended_error_with_edns():
    parsed = dns.parse_query(query(extra=OPT))
    answer = dns.encode_response(parsed, rcode=dns.NXDOMAIN, extended_error="not on the allow-list")
    assert answer[3] & 0xF == dns.NXDOMAIN
    assert answer.endswith(b"\x00\x12not on the allow-list")
    assert b"allow" not in dns.encode_response(
        dns.parse_query(query()), rcode=3, extended_error="allow"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 11,
        query()[:-1],
        query() + b"x",
        query(flags=0x8100),
        query(flags=0x0900),
        query(klass=3),
        query(counts=(2, 0, 0, 0)),
        query(counts=(0, 0, 0, 0)),
        query(counts=(1, 1, 0, 0)),
        query(b"\xc0\x0c"),
        query(b"\x41" + b"a" * 65 + b"\0"),
        query(b"\x03a.b\0"),
        query(b"\x03a\0b\0"),
        query(b"\x03a b\0"),
        query(b"\x03\xc3\xa9b\0"),
        query(b"\x3f" + b"a" * 63 + (b"\x3f" + b"a" * 63) * 3 + b"\0"),
        query(extra=b"\x01a\0" + OPT),
        query(extra=OPT[:-1]),
        query(extra=OPT[:-2] + b"\0\x05"),
        query() + b"\0" * 5000,
    ],
)
def test_invalid_queries_are_refused(data):
    with pytest.raises(dns.DnsFormatError):
        dns.parse_query(data)


def test_a_response_gets_no_response():
    assert dns.encode_error_response(query(flags=0x8100), dns.FORMERR) is None
    assert dns.encode_error_response(b"short", dns.FORMERR) is None
    assert dns.encode_error_response(query(b"\xc0\x0c"), dns.FORMERR)[3] & 0xF == dns.FORMERR


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: query()[:12] + tail))
def test_any_bytes_are_a_query_or_a_format_error(data):
    try:
        parsed = dns.parse_query(data)
    except dns.DnsFormatError:
        return
    assert parsed.question in data
    assert len(dns.encode_response(parsed, extended_error="x" * 500)) < 600


@given(
    st.lists(
        st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=20),
        min_size=1,
        max_size=8,
    )
)
def test_names_round_trip(labels):
    name = ".".join(labels)
    assert dns.parse_query(query(dns.encode_name(name))).name == name
