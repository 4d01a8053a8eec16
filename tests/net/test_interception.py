"""Requests to the host of an Http entry: credential, rules, budgets, scrubbing, attacks."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import logging
import ssl

import pytest
from tests.net.harness import read_all, rules
from tests.net.https_stub import HOST, TOKEN, gate, make_certificate, ok

from union import sandbox as sb

pytestmark = pytest.mark.spec("M1", "M2")


def status(response):
    return int(response.split(b" ", 2)[1])


async def eventually(check):
    async with asyncio.timeout(40):
        while not check():
            await asyncio.sleep(0.01)


async def test_the_credential_is_put_in_place_of_the_clients(monkeypatch):
    async with gate(monkeypatch) as g:
        response = await g.get("/v1/models?a=1", ("Authorization", f"Bearer {g.token.placeholder}"))
        assert status(response) == 200
        assert response.endswith(b"hello")
        (seen,) = g.stub.seen
        assert seen.value("authorization") == f"Bearer {TOKEN}"
        assert seen.target == "/v1/models?a=1"
        assert seen.value("host") == f"{HOST}:{g.stub.port}"
        await eventually(lambda: g.decisions)
        (decision,) = g.decisions
        assert decision.intercepted
        assert decision.allowed
        (request,) = g.requests
        assert (request.method, request.path, request.status) == ("GET", "/v1/models", 200)
        assert request.allowed
        assert request.has_credential
        assert request.bytes_down == 5


@pytest.mark.parametrize(
    "auth, expected",
    [
        (sb.Header("x-api-key", sb.Secret(TOKEN)), ("x-api-key", TOKEN)),
        (
            sb.Header("Authorization", sb.Secret(TOKEN), prefix="token "),
            ("authorization", f"token {TOKEN}"),
        ),
        (
            sb.Basic("user", sb.Secret(TOKEN)),
            ("authorization", "Basic " + base64.b64encode(f"user:{TOKEN}".encode()).decode()),
        ),
    ],
)
async def test_headers_of_another_account_are_removed(monkeypatch, auth, expected):
    others = (
        ("Authorization", "Bearer attacker"),
        ("X-Api-Key", "attacker"),
        ("X_Api_Key", "attacker"),
        ("x_authorization", "kept: no server reads it as a credential"),
        ("Cookie", "session=attacker"),
        ("X-Goog-Api-Key", "attacker"),
    )
    async with gate(monkeypatch, auth=auth) as g:
        assert status(await g.get("/", *others)) == 200
        (seen,) = g.stub.seen
        name, value = expected
        assert seen.values(name) == [value]
        assert "attacker" not in repr(seen)


async def test_a_query_parameter_is_replaced_in_every_spelling(monkeypatch):
    async with gate(monkeypatch, auth=sb.Query("key", sb.Secret(TOKEN))) as g:
        assert status(await g.get("/a?key=mine&%6bey=mine&key[]=mine&b=2")) == 200
        (seen,) = g.stub.seen
        path, _, query = seen.target.partition("?")
        assert path == "/a"
        assert query.startswith("b=2&key=sk-proj-")
        assert "mine" not in query
        assert status(await g.get("/a?b=1;key=mine")) == 403
        assert len(g.stub.seen) == 1


async def test_rules_decide_by_method_and_path(monkeypatch):
    async with gate(monkeypatch, allow=["GET /v1/*/items", "* /files/**"]) as g:
        for method, path, expected in (
            ("GET", "/v1/a/items", 200),
            ("GET", "/v1/a/items?x=1", 200),
            ("POST", "/v1/a/items", 403),
            ("GET", "/v1/a/b/items", 403),
            ("DELETE", "/files/a/b", 200),
            ("GET", "/files", 403),
            ("get", "/v1/a/items", 403),
        ):
            response = await g.get(path, method=method)
            assert status(response) == expected, (method, path)
        assert b"rule that would allow it: POST /v1/a/items" in await g.get(
            "/v1/a/items", method="POST"
        )
        refused = [r for r in g.requests if not r.allowed]
        assert refused[0].suggestion == "POST /v1/a/items"
        assert [r.allowed for r in g.requests].count(True) == 3


@pytest.mark.threat(181)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin", "/v1/./x", "/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1//x", "/v1/%2fadmin",
        "/v1\\..\\admin", "/v1/%5c..%5cadmin", "/v1/%252e%252e/admin", "/v1/x%00", "/v1/x%0a",
        "/v1/..;/admin", "/v1/%c0%ae%c0%ae/admin", "/v1/%ef%bc%8e%ef%bc%8e/admin",
        "/v1/%e2%80%a5/x", "/v1/x%", "/v1/x%zz", "http://api.test/v1/x", "*", "/v1/x#y", "v1/x",
    ],
)  # fmt: skip
async def test_a_path_that_servers_read_differently_is_refused(monkeypatch, path):
    async with gate(monkeypatch, allow=["GET /v1/**"]) as g:
        assert status(await g.get(path)) in {400, 403}
        assert not g.stub.seen
        assert status(await g.get("/v1/x%20y/%C3%A9")) == 200  # the positive control


@pytest.mark.threat(181)
@pytest.mark.parametrize(
    "request_",
    [
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nHost: evil.test\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}@evil.test\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\n\r\n",
        "GET /v1/x\r\n\r\n",
        "GET  /v1/x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nX: a\r\n folded\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nX : a\r\n\r\n",
        "GET /v1/x HTTP/1.1\nHost: {host}\r\n\r\n",
        "POST /v1/x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        (
            "POST /v1/x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        (
            "POST /v1/x HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n"
            "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n"
        ),
        "POST /v1/x HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "POST /v1/x HTTP/1.1\r\nHost: {host}\r\nContent-Length: +4\r\n\r\nabcd",
        "GET /v1/x HTTP/2.0\r\nHost: {host}\r\n\r\n",
        "GET http://evil.test/v1/x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nConnection: host\r\n\r\n",
        "TRACE /v1/x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT evil.test:443 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "get /v1/x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "PRI * HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET /v1/\xe9 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding:\x0bchunked\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nX: a\rY: b\r\n\r\n",
        "GET /v1/x HTTP/1.1\r\nHost: {host}\r\nX: a\0b\r\n\r\n",
    ],
)
async def test_a_request_with_two_readings_never_reaches_the_server(monkeypatch, request_):
    async with gate(monkeypatch) as g:
        host = f"{HOST}:{g.stub.port}"
        response = await g.send(request_.format(host=host).encode())
        assert status(response) in {400, 403}
        assert not g.stub.seen
        assert not g.requests[0].allowed


@pytest.mark.threat(181)
async def test_headers_that_replace_method_path_or_host_are_removed(monkeypatch):
    async with gate(monkeypatch, allow=["POST /v1/x"]) as g:
        names = ("X-HTTP-Method-Override", "X_HTTP_Method_Override", "X-Original-URL",
                 "X-Rewrite-URL", "X-Forwarded-Host", "Forwarded", "X-Method-Override")  # fmt: skip
        fields = [(name, "DELETE") for name in names]
        assert status(await g.get("/v1/x", *fields, method="POST")) == 200
        (seen,) = g.stub.seen
        assert "DELETE" not in repr(seen)
        assert status(await g.get("/v1/x?_method=DELETE", method="POST")) == 403


async def test_pipelined_requests_are_each_decided(monkeypatch):
    async with gate(monkeypatch, allow=["GET /ok"]) as g:
        host = f"{HOST}:{g.stub.port}"
        one = f"GET /ok HTTP/1.1\r\nHost: {host}\r\n\r\n"
        bad = f"GET /bad HTTP/1.1\r\nHost: {host}\r\n\r\n"
        response = await g.send((one + one + bad + one).encode())
        assert response.count(b"HTTP/1.1 200") == 2
        assert response.count(b"HTTP/1.1 403") == 1
        assert [seen.target for seen in g.stub.seen] == ["/ok", "/ok"]
        assert g.stub.connections == 1  # the server's connection is kept


async def test_a_hidden_request_in_a_body_is_a_body(monkeypatch):
    async with gate(monkeypatch, allow=["POST /ok"]) as g:
        host = f"{HOST}:{g.stub.port}"
        hidden = f"GET /bad HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        head = f"POST /ok HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        sized = f"{head}Content-Length: {len(hidden)}\r\n\r\n".encode() + hidden
        assert status(await g.send(sized)) == 200
        chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(hidden):x};ext=1\r\n".encode()
        assert status(await g.send(chunked + hidden + b"\r\n0\r\nTrailer: x\r\n\r\n")) == 200
        assert [seen.body for seen in g.stub.seen] == [hidden, hidden]
        assert all(seen.target == "/ok" for seen in g.stub.seen)


@pytest.mark.parametrize("body", [b"zz\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"-1\r\n\r\n"])
async def test_malformed_chunks_end_the_request(monkeypatch, body):
    async with gate(monkeypatch) as g:
        head = (
            f"POST / HTTP/1.1\r\nHost: {HOST}:{g.stub.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        response = await g.send(head.encode() + body)
        assert not response or status(response) == 400
        assert not any(seen.body for seen in g.stub.seen)


# Scrubbing.


def echoes(value):
    """Return the forms in which a server may repeat a secret."""
    raw = value.encode()
    forms = [raw, b"<" + raw + b">", raw + raw]
    forms += [base64.b64encode(b"x" * shift + raw) for shift in range(3)]
    forms += [base64.urlsafe_b64encode(b"user:" + raw)]
    forms += [b"".join(b"%%%02X" % c if chr(c) in "+/=" else bytes([c]) for c in raw)]
    return forms


@pytest.mark.threat(182)
@pytest.mark.parametrize("number", range(8))
async def test_a_secret_in_a_response_is_replaced(monkeypatch, number):
    body = b"before " + echoes(TOKEN)[number] + b" after"
    async with gate(monkeypatch) as g:
        g.stub.respond = lambda _: ok(body, ("x-echo", body.decode()))
        response = await g.get()
        assert TOKEN.encode() not in response
        assert echoes(TOKEN)[number] not in response
        assert response.count(b" after") == 2
        assert len(response.partition(b"\r\n\r\n")[2]) == len(body)


@pytest.mark.threat(182)
async def test_a_secret_that_is_split_into_pieces_is_replaced(monkeypatch):
    async with gate(monkeypatch) as g:

        def respond(seen):
            async def write(reader, writer):
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for character in f"<{TOKEN}>{TOKEN[:9]}":
                    writer.write(b"1\r\n%b\r\n" % character.encode())
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
                await writer.drain()

            return write

        g.stub.respond = respond
        response = await g.get()
        body = b"".join(
            line
            for at, line in enumerate(response.partition(b"\r\n\r\n")[2].split(b"\r\n"))
            if at % 2
        )
        assert body == f"<{g.token.placeholder}>{TOKEN[:9]}".encode()


async def test_events_are_not_delayed_by_scrubbing(monkeypatch):
    async with gate(monkeypatch) as g:
        go = asyncio.Event()

        def respond(seen):
            async def write(reader, writer):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
                writer.write(b"data: one\n\n")
                await writer.drain()
                await go.wait()
                writer.write(b"data: two\n\n")
                await writer.drain()
                return False

            return write

        g.stub.respond = respond
        reader, writer = await g.connect()
        writer.write(f"GET / HTTP/1.1\r\nHost: {HOST}:{g.stub.port}\r\n\r\n".encode())
        async with asyncio.timeout(40):
            await reader.readuntil(b"data: one\n\n")
            go.set()
            await reader.readuntil(b"data: two\n\n")
        writer.close()


@pytest.mark.threat(182)
async def test_a_response_is_neither_compressed_nor_partial(monkeypatch):
    async with gate(monkeypatch) as g:
        fields = (("Accept-Encoding", "gzip, br"), ("Range", "bytes=0-9"), ("If-Range", "x"))
        assert status(await g.get("/", *fields)) == 200
        (seen,) = g.stub.seen
        assert seen.value("accept-encoding") == "identity"
        assert not seen.values("range")
        assert not seen.values("if-range")
        echo = gzip.compress(TOKEN.encode())
        g.stub.respond = lambda _: ok(echo, ("content-encoding", "gzip"))
        response = await g.get()
        assert status(response) == 502
        assert echo not in response
        assert "scrub=False" in g.requests[-1].error
    async with gate(monkeypatch, scrub=False) as g:  # the positive control
        g.stub.respond = lambda _: ok(echo, ("content-encoding", "gzip"))
        assert (await g.get()).endswith(echo)


async def test_cookies_and_other_protocols_of_the_server_are_not_passed_on(monkeypatch):
    async with gate(monkeypatch) as g:
        g.stub.respond = lambda _: ok(
            b"x", ("set-cookie", "session=1"), ("alt-svc", 'h3=":443"'), ("x-kept", "1")
        )
        response = await g.get()
        assert b"session" not in response
        assert b"h3=" not in response
        assert b"x-kept: 1" in response


# Budgets.


@pytest.mark.threat(186)
async def test_budgets_of_requests_and_bytes(monkeypatch):
    async with gate(monkeypatch, max_requests=2) as g:
        assert [status(await g.get()) for _ in range(3)] == [200, 200, 403]
        assert "max_requests=2" in g.requests[-1].reason
    async with gate(monkeypatch, max_bytes_up=10) as g:
        assert status(await g.get("/", method="POST", body=b"x" * 10)) == 200
        assert status(await g.get("/", method="POST", body=b"x")) == 403
        head = (
            f"POST / HTTP/1.1\r\nHost: {HOST}:{g.stub.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        response = await g.send(f"{head}5\r\nabcde\r\n0\r\n\r\n".encode())
        assert not response or status(response) == 403
        assert sum(len(seen.body) for seen in g.stub.seen) == 10
    async with gate(monkeypatch, max_bytes_down=5) as g:
        assert status(await g.get()) == 200
        assert status(await g.get()) == 403
    async with gate(monkeypatch, max_bytes_down=4) as g:
        assert b"hello" not in await g.get()


# TLS and names.


@pytest.mark.threat(183)
async def test_another_server_name_is_refused(monkeypatch):
    async with gate(monkeypatch) as g:
        context = g.client_context()
        context.check_hostname = False
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await g.connect(server_name="front.test", context=context)
        await eventually(lambda: g.decisions)
        assert "server name differs" in g.decisions[0].reason
        assert not g.decisions[0].allowed


@pytest.mark.threat(183)
async def test_another_front_of_the_same_server_does_not_avoid_the_rules(monkeypatch):
    """A tunnel to an allowed name or address must not carry the name of a bound host."""
    async with gate(monkeypatch, allow=["GET /ok"], also=["front.test"]) as g:
        insecure = ssl._create_unverified_context()
        for host in ("front.test", "127.0.0.1"):
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await g.connect(host=host, context=insecure)
        await eventually(lambda: len(g.decisions) == 2)
        assert all("has an Http entry" in decision.reason for decision in g.decisions)
        # The positive control: its own name is tunnelled end to end.
        reader, writer = await g.connect(
            host="front.test", server_name="front.test", context=insecure
        )
        writer.write(b"GET /any HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(40):
            await reader.readuntil(b"hello")
        writer.close()
        await eventually(lambda: len(g.decisions) == 3)
        assert not g.decisions[-1].intercepted


async def test_the_server_must_have_a_valid_certificate(monkeypatch, tmp_path):
    async with gate(monkeypatch) as g:
        ca, _ = make_certificate([HOST], tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        response = await g.get()
        assert status(response) == 502
        assert b"certificate was not accepted" in response
        assert not g.stub.seen
        assert g.requests[0].error


async def test_a_client_that_does_not_trust_the_authority_is_explained(monkeypatch):
    async with gate(monkeypatch) as g:
        g.interception.prepare()
        with pytest.raises(ssl.SSLError):
            await g.connect(context=ssl.create_default_context())
        await eventually(lambda: g.decisions)
        assert "SSL_CERT_FILE" in g.decisions[0].error


@pytest.mark.threat(184)
async def test_each_session_has_its_own_authority(monkeypatch):
    async with gate(monkeypatch) as one, gate(monkeypatch) as other:
        with pytest.raises(ssl.SSLError):
            await other.connect(context=one.client_context())


async def test_http2_is_refused_with_the_setting_to_change(monkeypatch):
    async with gate(monkeypatch) as g:
        context = g.client_context()
        context.set_alpn_protocols(["h2"])
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await g.connect(context=context)
        await eventually(lambda: g.decisions)
        assert "HTTP/2" in g.decisions[0].reason
        context.set_alpn_protocols(["h2", "http/1.1"])  # the positive control: a choice
        assert status(await g.get(context=context)) == 200


@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
async def test_http2_without_negotiation_is_explained(monkeypatch, protocols):
    """Clients of gRPC with prior knowledge."""
    async with gate(monkeypatch) as g:
        context = g.client_context()
        if protocols:
            context.set_alpn_protocols(protocols)
        await g.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", context=context)
        await eventually(lambda: g.decisions)
        assert "HTTP/2" in g.decisions[0].error
        assert "HTTP/1.1 client" in g.decisions[0].error
        assert not g.stub.seen


async def test_plain_http_is_upgraded(monkeypatch):
    async with gate(monkeypatch) as g:
        host = f"{HOST}:{g.stub.port}"
        request = (
            f"GET http://{host}/plain?x=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        response = await g.harness.http(request.encode(), end=False)
        assert status(response) == 200
        assert g.stub.seen[0].value("authorization") == f"Bearer {TOKEN}"
        assert g.stub.seen[0].target == "/plain?x=1"
        request = f"GET http://{HOST}/plain HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        assert status(await g.harness.http(request.encode(), end=False)) == 200  # port 80
        reader, writer = await g.harness.connect("http")
        writer.write(f"CONNECT {HOST}:80 HTTP/1.1\r\nHost: {HOST}:80\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"GET /t HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        assert status(await asyncio.wait_for(read_all(reader), 40)) == 200
        writer.close()


async def test_the_deny_list_comes_first(monkeypatch):
    async with gate(monkeypatch, deny=[HOST]) as g:
        target = f"{HOST}:{g.stub.port}"
        request = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()
        assert status(await g.harness.http(request)) == 403


# Policy changes and records.


async def test_a_change_of_policy_ends_the_connection(monkeypatch):
    async with gate(monkeypatch) as g:
        reader, writer = await g.connect()
        host = f"{HOST}:{g.stub.port}"
        request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        async with asyncio.timeout(40):
            writer.write(request)
            await reader.readuntil(b"hello")
            # The same host by name: end to end from now on, so this connection has to end.
            g.harness.egress.switch(rules([HOST, "127.0.0.1"]))
            writer.write(request)
            assert await read_all(reader) == b""
        writer.close()
        assert len(g.stub.seen) == 1
        tunnel = await g.connect(context=ssl.create_default_context())
        tunnel[1].write(f"GET /t HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        async with asyncio.timeout(40):
            await tunnel[0].readuntil(b"hello")
            assert not g.stub.seen[-1].values("authorization")
            g.harness.egress.switch(rules([g.http, "127.0.0.1"]))  # and the other way round
            assert await read_all(tunnel[0]) == b""
        tunnel[1].close()


@pytest.mark.threat(185)
async def test_the_secret_is_in_no_log_and_no_record(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    async with gate(monkeypatch, allow=["GET /ok"]) as g:
        for path in ("/ok", "/bad", "/%2e"):
            await g.get(path, ("Authorization", f"Bearer {g.token.placeholder}"))
        g.stub.respond = lambda _: b"HTTP/1.1 200 " + TOKEN.encode() + b"\r\nbroken\r\n\r\n"
        await g.get("/ok")
        await eventually(lambda: len(g.requests) == 4)
        shown = (
            f"{g.requests} {g.decisions} {caplog.text} {g.http} {g.http.auth} {g.harness.egress}"
        )
        assert TOKEN not in shown
        assert hashlib.sha256(TOKEN.encode()).hexdigest() not in shown
        assert "refused GET /bad" in caplog.text
