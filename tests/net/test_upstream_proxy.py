"""Allowed connections go through the caller's own proxy; our policy stays in front of it."""

from __future__ import annotations

import pytest
from tests.net.harness import echo, rules, serving

from union.sandbox._core.upstream import parse_upstream

LOOPBACK = "127.0.0.0/8"


@pytest.fixture
async def upstream(open_doors):
    """A second set of doors plays the part of the caller's proxy."""
    return open_doors(
        rules(["a.example", LOOPBACK]),
        table={"a.example": ["127.0.0.1"]},
        credentials="me:s@cret",
    )


def url(upstream, kind, secret="s%40cret"):
    door = "http" if kind == "http" else "socks"
    return parse_upstream(
        f"{kind}://me:{secret}@127.0.0.1:{upstream.ports[door]}", argument="network_proxy_url"
    )


@pytest.mark.parametrize("kind", ["http", "socks5", "socks5h"])
async def test_a_tunnel_through_it_by_name(open_doors, upstream, kind):
    async with serving(echo) as port:
        doors = open_doors(rules(["a.example"]), upstream=url(upstream, kind))
        request = f"CONNECT a.example:{port} HTTP/1.1\r\n\r\nhello".encode()
        assert (await doors.http(request)).endswith(b"\r\n\r\nhello")
        # Not known here, so it goes by name.
        assert doors.resolver.asked == ["a.example"]
        assert upstream.resolver.asked == ["a.example"]
        refused = await doors.http(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 403 ")
        assert upstream.resolver.asked == ["a.example"]
        assert doors.resolver.asked == ["a.example"]


@pytest.mark.parametrize("kind", ["http", "socks5"])
@pytest.mark.parametrize("plain", [True, False])
async def test_a_name_that_leads_inwards_is_not_handed_to_it(open_doors, upstream, kind, plain):
    doors = open_doors(
        rules(None, ["169.254.0.0/16"]),
        upstream=url(upstream, kind),
        table={"a.example": ["93.184.215.14", "169.254.169.254"]},
    )
    request = b"CONNECT a.example:80 HTTP/1.1\r\n\r\n"
    if plain:
        request = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
    assert (await doors.http(request)).startswith(b"HTTP/1.1 403 ")
    assert upstream.resolver.asked == []
    (decision,) = doors.decisions
    assert (decision.allowed, decision.rule) == (False, "169.254.0.0/16")


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_plain_request_through_it(open_doors, upstream, kind):
    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)

    async with serving(answer) as port:
        doors = open_doors(rules(["a.example"]), upstream=url(upstream, kind))
        host = f"a.example:{port}"
        got = await doors.http(f"GET http://{host}/x HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert b" 200 OK" in got
        assert b"GET /x HTTP/1.1\r\nhost: " + host.encode() in got
        assert b"authorization" not in got
        refused = await doors.http(
            b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        )
        assert refused.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_proxy_that_says_no_is_an_error_not_a_refusal(open_doors, upstream, kind):
    doors = open_doors(rules(["a.example"]), upstream=url(upstream, kind, "wrong"))
    answer = await doors.http(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")
    (decision,) = doors.decisions
    assert decision.allowed
    assert "upstream proxy" in decision.error


async def test_a_proxy_that_is_not_there(open_doors):
    async with serving(echo) as port:
        pass
    gone = parse_upstream(f"http://127.0.0.1:{port}", argument="network_proxy_url")
    doors = open_doors(rules(["a.example"]), upstream=gone)
    answer = await doors.http(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")
