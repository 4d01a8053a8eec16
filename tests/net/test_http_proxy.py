"""CONNECT and plain requests, and requests that name two hosts."""

from __future__ import annotations

import asyncio
import base64

import pytest
from tests.net.harness import echo, read_all, rules, serving
from tests.unit.test_client_hello import client_hello

LOOPBACK = "127.0.0.0/8"


def origin(seen):
    """A minimal web server that stores the head and body of each request."""

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        body = b""
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            while not body.endswith(b"0\r\n\r\n"):
                more = await reader.read(65536)
                if not more:
                    return
                body += more
        elif b"content-length: " in lower:
            size = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(size)
        seen.append((head, body))
        if b"/chunked" in head:
            writer.write(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            )
        elif b"/endless" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nKeep-Alive: 5\r\n\r\nuntil the end")
        elif b"/both" in head:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
        elif b"/junk" in head:
            writer.write(b"220 not http\r\n\r\n")
        elif b"/continue" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()

    return handle


def get(url, host, extra="", method="GET"):
    return f"{method} {url} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()


@pytest.fixture
async def web(open_egress):
    seen = []
    async with serving(origin(seen)) as port:
        harness = open_egress(
            rules(["a.example", "b.example", LOOPBACK]),
            table={"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]},
        )
        harness.port = port
        harness.seen = seen
        yield harness


async def test_connect_opens_a_tunnel(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        # Bytes after the request belong to the tunnel.
        answer = await harness.http(
            f"CONNECT A.Example.:{port} HTTP/1.1\r\nHost: a.example:{port}\r\n\r\nhello".encode()
        )
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\nhello"


async def test_a_plain_request_is_forwarded_without_hop_by_hop_fields(web):
    url = f"http://a.example:{web.port}/x?y=1"
    extra = "Proxy-Connection: keep-alive\r\nX-Hop: 1\r\nConnection: X-Hop\r\nAccept: */*\r\n"
    answer = await web.http(get(url, f"a.example:{web.port}", extra))
    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    ((head, _body),) = web.seen
    assert head == (
        b"GET /x?y=1 HTTP/1.1\r\nhost: a.example:%d\r\naccept: */*\r\nconnection: close\r\n\r\n"
        % web.port
    )


async def test_each_request_on_one_connection_is_checked(web):
    one = get(f"http://a.example:{web.port}/1", f"a.example:{web.port}")
    two = get(f"http://b.example:{web.port}/2", f"b.example:{web.port}")
    bad = get(f"http://evil.example:{web.port}/3", f"evil.example:{web.port}")
    answer = await web.http(one + two + bad + one)
    assert answer.count(b"200 OK") == 2
    assert answer.count(b"403 Forbidden") == 1
    assert len(web.seen) == 2
    await web.aclose()
    assert [(d.host, d.allowed) for d in web.decisions] == [
        ("a.example", True),
        ("b.example", True),
        ("evil.example", False),
    ]
    assert b"entry that would allow it: evil.example:" in answer
    assert web.resolver.queries == ["a.example", "b.example"]


@pytest.mark.parametrize("path,body", [("/chunked", b"3\r\nabc\r\n0\r\n\r\n"), ("/", b"ok")])
async def test_framed_responses_keep_the_connection_open(web, path, body):
    request = get(f"http://a.example:{web.port}{path}", f"a.example:{web.port}")
    assert (await web.http(request + request)).count(body) == 2


async def test_a_response_without_a_length_ends_the_connection(web):
    answer = await web.http(
        get(f"http://a.example:{web.port}/endless", f"a.example:{web.port}") * 2
    )
    assert answer == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end"


async def test_bodies_are_forwarded_and_the_next_request_is_separate(web):
    host = f"a.example:{web.port}"
    sized = get(f"http://{host}/", host, "Content-Length: 5\r\n", "POST") + b"hello"
    chunked = get(f"http://{host}/", host, "Transfer-Encoding: chunked\r\n", "POST")
    chunked += b"5\r\nhello\r\n0\r\n\r\n"
    assert (await web.http(sized + chunked + sized)).count(b"200 OK") == 3
    assert [body for _head, body in web.seen] == [b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"hello"]


async def test_interim_responses_and_responses_without_a_body(web):
    host = f"a.example:{web.port}"
    answer = await web.http(
        get(f"http://{host}/continue", host) + get(f"http://{host}/", host, "", "HEAD")
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
    assert answer.endswith(b"content-length: 2\r\n\r\n")


@pytest.mark.parametrize("path", ["/both", "/junk"])
async def test_invalid_responses_are_not_forwarded(web, path):
    answer = await web.http(get(f"http://a.example:{web.port}{path}", f"a.example:{web.port}"))
    assert answer.startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET http://a.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example:81\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nHost: evil.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n Host: evil.example\r\n\r\n",
        b"GET http://user@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://evil.example@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example\\@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example#@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example%00.evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example:80:81/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http:///a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET ftp://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nConnection: host\r\n\r\n",
        b"CONNECT a.example HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:444\r\n\r\n",
        b"CONNECT http://a.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT u@a.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:443@evil.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:0 HTTP/1.1\r\n\r\n",
        get("http://a.example/", "a.example", "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n")
        + b"0\r\n\r\n",
        get("http://a.example/", "a.example", "Content-Length: 3\r\nContent-Length: 4\r\n")
        + b"abcd",
        b"GET http://a.example/ HTTP/1.1\nHost: a.example\n\nGET x HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused_before_any_lookup(web, request_bytes):
    answer = await web.http(request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert web.resolver.queries == []
    assert web.seen == []
    assert [d.allowed for d in web.decisions] == [False]


@pytest.mark.parametrize(
    "target",
    ["evil.example:443", "10.0.0.1:443", "[::1]:443", "169.254.169.254:80", "2852039166:80",
     "0xa9fea9fe:80", "[::ffff:169.254.169.254]:80", "a.example.evil:443", "xa.example:443"],
)  # fmt: skip
async def test_connect_to_an_unlisted_destination_is_forbidden(open_egress, target):
    harness = open_egress(rules(["a.example"]))
    answer = await harness.http(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert harness.resolver.queries == []


async def test_an_allowed_name_with_an_internal_address_is_forbidden(open_egress):
    harness = open_egress(rules(["a.example"]), table={"a.example": ["127.0.0.1", "10.0.0.1"]})
    for request in (
        b"CONNECT a.example:443 HTTP/1.1\r\n\r\n",
        get("http://a.example/", "a.example"),
    ):
        answer = await harness.http(request)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"127.0.0.1" in answer


async def test_request_smuggling_in_a_body_ends_the_connection(web):
    host = f"a.example:{web.port}"
    head = get(f"http://{host}/", host, "Transfer-Encoding: chunked\r\n", "POST")
    answer = await web.http(head + b"5\nhello\n0\n\nGET http://evil.example/ HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


async def test_a_tunnel_with_a_refused_server_name_is_reset(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        connect = f"CONNECT a.example:{port} HTTP/1.1\r\n\r\n".encode()
        hidden = await harness.http(connect + client_hello("hidden.example"))
        assert hidden in {b"", b"HTTP/1.1 200 Connection established\r\n\r\n"}
        fine = client_hello("a.example")
        assert (await harness.http(connect + fine)).endswith(fine)
        await harness.aclose()
    assert [d.allowed for d in harness.decisions] == [False, True]


async def test_an_endless_head_is_refused(open_egress):
    harness = open_egress(rules([]))
    answer = await harness.http(b"GET http://a.example/ HTTP/1.1\r\nX: " + b"a" * 65_536, end=False)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_slow_clients_time_out(open_egress, monkeypatch):
    monkeypatch.setattr("union.sandbox._net.http_proxy._HEAD_TIMEOUT_S", 0.2)
    harness = open_egress(rules([]))
    assert (await harness.http(b"GET http", end=False)).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_client_is_disconnected_without_a_response(web, monkeypatch):
    monkeypatch.setattr("union.sandbox._net.http_proxy._IDLE_TIMEOUT_S", 0.1)
    request = get(f"http://a.example:{web.port}/", f"a.example:{web.port}")
    assert (await web.http(request, end=False)).count(b"HTTP/1.1") == 1


async def test_configured_credentials_are_required(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules([LOOPBACK]), credentials="run:secret")
        for secret, status in ((None, b"407"), ("run:wrong", b"407"), ("run:secret", b"200")):
            header = ""
            if secret is not None:
                value = base64.b64encode(secret.encode()).decode()
                header = f"Proxy-Authorization: Basic {value}\r\n"
            answer = await harness.http(
                f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n{header}\r\n".encode()
            )
            assert answer.split(b" ")[1] == status


async def test_an_early_response_to_a_large_body_arrives(open_egress):
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.5)

    async with serving(refuse) as port:
        harness = open_egress(rules([LOOPBACK]))
        host = f"127.0.0.1:{port}"
        reader, writer = await harness.connect("http")
        writer.write(get(f"http://{host}/", host, "Content-Length: 100000000\r\n", "POST"))
        writer.write(b"x" * 1000)
        answer = await asyncio.wait_for(read_all(reader), 40)
        assert answer.startswith(b"HTTP/1.1 413 ")
        writer.close()
