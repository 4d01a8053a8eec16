from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._codecs.http1 import (
    ChunkedBody,
    HttpFormatError,
    body_length,
    forwarded_headers,
    parse_request_head,
    parse_response_head,
    split_authority,
)


def test_a_request_head_is_parsed():
    head = parse_request_head(
        b"GET http://a.example/x?y HTTP/1.1\r\nHost: a.example\r\nX:  y \r\n\r\n"
    )
    assert (head.method, head.target, head.minor) == ("GET", "http://a.example/x?y", 1)
    assert head.headers == (("host", "a.example"), ("x", "y"))


@pytest.mark.threat(84, 95)
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\r\nHost: a\n\r\n\r\n",
        b"GET / HTTP/1.1\nX: y\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET /\xe9 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1 \r\n\r\n",
        b"GET /\r\n\r\n",
        b"G(T / HTTP/1.1\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nNoColon\r\n\r\n",
        b"GET / HTTP/1.1\r\n: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\rb\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)
def test_invalid_requests_are_refused(data):
    with pytest.raises(HttpFormatError):
        parse_request_head(data)


@pytest.mark.parametrize(
    "line", [b"HTTP/1.1 20 x", b"HTTP/2 200 x", b"HTTP/1.1 200\tx", b"ICY 200 OK"]
)
def test_invalid_status_lines_are_refused(line):
    with pytest.raises(HttpFormatError):
        parse_response_head(line + b"\r\n\r\n")


def test_a_status_line_needs_no_reason():
    assert parse_response_head(b"HTTP/1.1 204\r\n\r\n").status == 204


@pytest.mark.threat(95)
@pytest.mark.parametrize(
    "headers",
    [
        [("content-length", "1"), ("transfer-encoding", "chunked")],
        [("content-length", "1"), ("content-length", "1")],
        [("content-length", "1, 1")],
        [("content-length", "+1")],
        [("content-length", "-1")],
        [("content-length", "0x1")],
        [("content-length", "\u0661")],
        [("content-length", "")],
        [("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
        [("transfer-encoding", "gzip, chunked")],
        [("transfer-encoding", "identity")],
        [("transfer-encoding", "\x0bchunked")],
    ],
)
def test_ambiguous_lengths_are_refused(headers):
    with pytest.raises(HttpFormatError):
        body_length(tuple(headers), minor=1)


def test_length_of_a_body():
    assert body_length((), minor=1) is None
    assert body_length((("content-length", "12"),), minor=1) == 12
    assert body_length((("transfer-encoding", "Chunked"),), minor=1) == "chunked"
    with pytest.raises(HttpFormatError):
        body_length((("transfer-encoding", "chunked"),), minor=0)


def test_hop_by_hop_fields_are_dropped():
    headers = (
        ("connection", "X-Own, close"),
        ("x-own", "1"),
        ("proxy-authorization", "secret"),
        ("upgrade", "h2c"),
        ("te", "trailers"),
        ("accept", "*/*"),
    )
    assert forwarded_headers(headers) == (("accept", "*/*"),)
    with pytest.raises(HttpFormatError):
        forwarded_headers((("connection", "close, Host"),))


@pytest.mark.parametrize(
    "text,expected",
    [
        ("a.example:443", ("a.example", 443)),
        ("a.example", ("a.example", 80)),
        ("[::1]:8080", ("::1", 8080)),
        ("[::1]", ("::1", 80)),
    ],
)
def test_authority(text, expected):
    assert split_authority(text, default_port=80) == expected


@pytest.mark.threat(84, 90)
@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "u@a:80",
        "a:80:80",
        "a:0",
        "a:65536",
        "a:",
        "a: 80",
        "a/b",
        "a\\b",
        "a%00:80",
        "[::1",
        "[a]:80",
        "[::1]80",
        "a?b",
        "a#b",
        "a,b",
    ],
)
def test_invalid_authorities_are_refused(text):
    with pytest.raises(HttpFormatError):
        split_authority(text, default_port=80)


def test_connect_needs_a_port():
    with pytest.raises(HttpFormatError):
        split_authority("a.example", default_port=None)


def test_extensions_and_trailers_are_dropped():
    body = ChunkedBody()
    out = body.feed(b"3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\nGET /next")
    assert (out, body.done, body.rest) == (b"3\r\nabc\r\n0\r\n\r\n", True, b"GET /next")


@pytest.mark.threat(95)
@pytest.mark.parametrize(
    "data",
    [
        b"3\nabc\r\n",
        b"g\r\n",
        b"\r\n",
        b"-1\r\n",
        b"0x3\r\nabc",
        b" 3\r\nabc",
        b"3 \r\nabc",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"1" * 17 + b"\r\n",
        b"1;" + b"a" * 2000,
        b"0\r\nbad trailer\r\n\r\n",
    ],
)
def test_invalid_chunks_are_refused(data):
    with pytest.raises(HttpFormatError):
        ChunkedBody().feed(data)


@given(
    st.lists(st.binary(min_size=1, max_size=50), max_size=5),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_a_chunked_body_does_not_depend_on_read_sizes(chunks, cuts):
    wire = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    body = ChunkedBody()
    out = bytearray()
    rest = wire
    for cut in cuts:
        out += body.feed(rest[:cut])
        rest = rest[cut:]
    out += body.feed(rest)
    assert body.done
    assert out == wire


@given(st.binary(max_size=60))
def test_any_bytes_are_a_head_or_a_format_error(data):
    for parse in (parse_request_head, parse_response_head):
        try:
            parse(data + b"\r\n\r\n")
        except HttpFormatError:
            continue
