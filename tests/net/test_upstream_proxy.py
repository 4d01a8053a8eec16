"""Allowed connections use the caller's proxy; the policy applies before it."""

from __future__ import annotations

import pytest
from tests.net.harness import FakeResolver, echo, rules, serving

from union.sandbox._net.own_server import OwnServer
from union.sandbox._net.upstream import UpstreamDialer
from union.sandbox._policy.upstream import parse_upstream

LOOPBACK = "127.0.0.0/8"


@pytest.fixture
async def upstream(open_egress):
    """Start a second egress that acts as the caller's proxy."""
    return open_egress(
        rules(["a.example", LOOPBACK]),
        table={"a.example": ["127.0.0.1"]},
        credentials="me:s@cret",
    )


def url(upstream, kind, secret="s%40cret"):
    frontend = "http" if kind == "http" else "socks"
    return parse_upstream(
        f"{kind}://me:{secret}@127.0.0.1:{upstream.ports[frontend]}", argument="network_proxy_url"
    )


@pytest.mark.parametrize("kind", ["http", "socks5", "socks5h"])
async def test_a_tunnel_through_the_proxy_uses_the_name(open_egress, upstream, kind):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example"]), upstream=url(upstream, kind))
        request = f"CONNECT a.example:{port} HTTP/1.1\r\n\r\nhello".encode()
        assert (await harness.http(request)).endswith(b"\r\n\r\nhello")
        # This host cannot resolve the name, so the proxy gets it.
        assert harness.resolver.queries == ["a.example"]
        assert upstream.resolver.queries == ["a.example"]
        refused = await harness.http(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 403 ")
        assert upstream.resolver.queries == ["a.example"]
        assert harness.resolver.queries == ["a.example"]


@pytest.mark.parametrize("kind", ["http", "socks5"])
@pytest.mark.parametrize("plain", [True, False])
async def test_a_name_with_a_denied_address_is_not_sent_to_the_proxy(
    open_egress, upstream, kind, plain
):
    harness = open_egress(
        rules(None, ["169.254.0.0/16"]),
        upstream=url(upstream, kind),
        table={"a.example": ["93.184.215.14", "169.254.169.254"]},
    )
    request = b"CONNECT a.example:80 HTTP/1.1\r\n\r\n"
    if plain:
        request = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
    assert (await harness.http(request)).startswith(b"HTTP/1.1 403 ")
    assert upstream.resolver.queries == []
    (decision,) = harness.decisions
    assert (decision.allowed, decision.rule) == (False, "169.254.0.0/16")


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_plain_request_through_the_proxy(open_egress, upstream, kind):
    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)

    async with serving(answer) as port:
        harness = open_egress(rules(["a.example"]), upstream=url(upstream, kind))
        host = f"a.example:{port}"
        got = await harness.http(f"GET http://{host}/x HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert b" 200 OK" in got
        assert b"GET /x HTTP/1.1\r\nhost: " + host.encode() in got
        assert b"authorization" not in got
        refused = await harness.http(
            b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        )
        assert refused.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_refusal_by_the_proxy_is_an_error_not_a_policy_refusal(open_egress, upstream, kind):
    harness = open_egress(rules(["a.example"]), upstream=url(upstream, kind, "wrong"))
    answer = await harness.http(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")
    (decision,) = harness.decisions
    assert decision.allowed
    assert "upstream proxy" in decision.error


async def test_an_unreachable_proxy_is_an_error(open_egress):
    async with serving(echo) as port:
        pass
    gone = parse_upstream(f"http://127.0.0.1:{port}", argument="network_proxy_url")
    harness = open_egress(rules(["a.example"]), upstream=gone)
    answer = await harness.http(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")


class EchoingProxy:
    """A proxy whose responses repeat the request, including the credentials."""

    def __init__(self):
        self.heads = []

    async def __call__(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"CONNECT") and b"refused.example" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\nX-Repeated: " + credentials_in(head) + b"\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(head))
        writer.write(b"Proxy-Repeated: " + credentials_in(head) + b"\r\n\r\n" + head)


def credentials_in(head):
    lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"proxy-auth")]
    return lines[0].partition(b": ")[2] if lines else b"none"


PAIR = b"bWU6czNjcmV0"  # me:s3cret


@pytest.mark.threat(161)
@pytest.mark.parametrize("method", ["GET", "TRACE", "trace", "TRACK", "OPTIONS", "DEBUG", "X-OWN"])
@pytest.mark.parametrize("name", ["a.example", "refused.example"])
async def test_no_response_contains_the_credentials_of_the_upstream(open_egress, method, name):
    proxy = EchoingProxy()
    async with serving(proxy) as port:
        up = parse_upstream(f"http://me:s3cret@127.0.0.1:{port}", argument="network_proxy_url")
        harness = open_egress(rules([name]), upstream=up)
        request = f"{method} http://{name}/ HTTP/1.1\r\nHost: {name}\r\nMax-Forwards: 0\r\n\r\n"
        answer = await harness.http(request.encode())
        assert answer.startswith(b"HTTP/1.1 ")
        assert PAIR not in answer
        assert b"proxy-" not in answer.lower()
        if method in {"TRACE", "trace", "TRACK", "DEBUG"}:
            assert answer.startswith(b"HTTP/1.1 405 ")
            assert harness.decisions[-1].rule == "method"
        else:
            # Control: the proxy received the credentials with CONNECT and repeats them.
            assert PAIR in proxy.heads[0]
            assert proxy.heads[0].startswith(b"CONNECT ")


async def test_a_proxy_without_credentials_gets_plain_requests(open_egress):
    """Many proxies tunnel to port 443 only; without credentials nothing can leak."""
    proxy = EchoingProxy()
    async with serving(proxy) as port:
        up = parse_upstream(f"http://127.0.0.1:{port}", argument="network_proxy_url")
        harness = open_egress(rules(["a.example"]), upstream=up)
        request = b"GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\nProxy-Odd: 1\r\n\r\n"
        answer = await harness.http(request)
        assert b"GET http://a.example:80/x HTTP/1.1" in answer
        assert b"proxy-odd" not in proxy.heads[0].lower()
        assert b"proxy-repeated" not in answer.lower()


@pytest.mark.threat(151)
@pytest.mark.parametrize("plain", [True, False])
async def test_the_address_of_a_proxy_is_checked_and_pinned(open_egress, plain):
    async with serving(EchoingProxy()) as port:
        up = parse_upstream(f"http://proxy.example:{port}", argument="network_proxy_url")
        request = b"CONNECT a.example:443 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        if plain:
            request = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
        cases = {
            "named by address": (rules(["proxy.example", f"127.0.0.1:{port}"]), True),
            "chosen by the caller": (None, True),
            "internal address": (rules(["proxy.example"]), False),
            "another port": (rules(["proxy.example:1", "127.0.0.1:1"]), False),
            "not named": (rules([]), False),
        }
        for case, (proxy_rules, reached) in cases.items():
            resolver = FakeResolver({"proxy.example": [["127.0.0.1"], ["192.0.2.1"]]})
            dialer = UpstreamDialer(up, resolver=resolver, rules=proxy_rules)
            harness = open_egress(rules(["a.example"]), upstream=dialer)
            for _ in range(2):
                answer = await harness.http(request)
                assert (b"HTTP/1.1 200 " in answer) == reached, case
            if reached:
                assert resolver.queries == ["proxy.example"], (
                    "resolved once: later lookups change nothing"
                )
            else:
                assert harness.decisions[0].rule == "upstream-proxy"


@pytest.mark.threat(151)
async def test_the_server_itself_is_never_a_proxy(open_egress):
    async with serving(EchoingProxy()) as port, serving(EchoingProxy()) as other:
        for chosen in (port, other):
            up = parse_upstream(f"http://127.0.0.1:{chosen}", argument="network_proxy_url")
            dialer = UpstreamDialer(
                up, resolver=FakeResolver({}), own_server=OwnServer([("0.0.0.0", port)])
            )
            harness = open_egress(rules(["a.example"]), upstream=dialer)
            request = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
            answer = await harness.http(request)
            assert answer.startswith(b"HTTP/1.1 403 " if chosen == port else b"HTTP/1.1 200 ")
