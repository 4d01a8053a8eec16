"""Fuzz targets for the input of the network frontends and for list entries."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import TYPE_CHECKING, Any

from union.sandbox._codecs import client_hello as tls
from union.sandbox._codecs import dns
from union.sandbox._codecs.client_hello import TlsFormatError, parse_client_hello
from union.sandbox._codecs.http1 import (
    ChunkedBody,
    HttpFormatError,
    body_length,
    forwarded_headers,
    parse_request_head,
    parse_response_head,
    split_authority,
)
from union.sandbox._net.dialer import DialError, OutboundConnection, RefusedError
from union.sandbox._net.dns import StubResolver
from union.sandbox._net.http_proxy import HttpFrontend
from union.sandbox._net.ledger import Ledger
from union.sandbox._net.policy import Policy
from union.sandbox._net.socks import SocksFrontend
from union.sandbox._net.stream import Stream
from union.sandbox._policy.names import NameSyntaxError, normalise_name
from union.sandbox._policy.rules import (
    NetworkRules,
    decide_name,
    decide_server_name,
    first_uncovered,
    parse_entries,
    parse_host,
)
from union.sandbox._policy.synthetic import SyntheticNames
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._net.ledger import Attempt

RULES = NetworkRules(
    allow=parse_entries(
        ["allowed.test", "*.wild.test:80", "192.0.2.0/24", "xn--bcher-kva.test"],
        argument="network_allowlist",
    ),
    deny=parse_entries(["no.wild.test", "192.0.2.7"], argument="network_denylist"),
)
LOOP = asyncio.new_event_loop()
ARGUMENTS = ("network_allowlist", "network_denylist")


def may_reach(host: object, port: int) -> bool:
    """Apply ``RULES`` in an independent, simpler implementation."""
    if isinstance(host, str):
        if host == "no.wild.test":
            return False
        return host in {"allowed.test", "xn--bcher-kva.test"} or (
            host.endswith(".wild.test") and port == 80
        )
    text = str(host)
    return text.startswith("192.0.2.") and text != "192.0.2.7"


# Lists.


def check_name(host: str) -> object:
    """Return the parsed host, which must be stable under parsing; None if it is refused."""
    try:
        found = parse_host(host)
    except NameSyntaxError:
        return None
    assert parse_host(str(found)) == found
    if isinstance(found, str):
        assert found.isascii()
        assert found == found.lower()
        assert 0 < len(found) <= 253
        assert not set(found) - set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
        assert "" not in found.split(".")
        if host.isascii():
            assert found == host.lower().removesuffix(".")
        with contextlib.suppress(UnicodeError):
            # The system's resolver would look up the same name.
            assert host.encode("idna").decode("ascii").lower().removesuffix(".") == found
    return found


def hosts(data: bytes) -> None:
    """Parse an entry (first line) and hosts (other lines)."""
    entry_text, *others = data.decode("utf-8", "surrogateescape").split("\n")[:4]
    for host in others:
        check_name(host)
        assert decide_name(NetworkRules(allow=()), host, 443).allowed is False
    for argument in ARGUMENTS:
        try:
            (entry,) = parse_entries([entry_text], argument=argument)
        except PolicyError as exc:
            assert exc.argument == argument  # noqa: PT017 - a target, not a test
            continue
        assert parse_entries([entry.text], argument=argument) == (entry,)
        assert first_uncovered((entry,), ceiling=(entry,)) is None
        assert entry.port is None or 1 <= entry.port <= 65535
        if entry.kind != "network":
            assert normalise_name(entry.name) == entry.name
        for host in others:
            _not_wider(NetworkRules(allow=(entry,)), host)


def _not_wider(rules: NetworkRules, host: str) -> None:
    (entry,) = rules.allow or ()
    for port in (entry.port or 443, 1):
        verdict = decide_name(rules, host, port)
        if not verdict.allowed:
            continue
        assert entry.port in {None, port}
        found = check_name(host)
        if entry.kind == "name":
            assert found == entry.name
        elif entry.kind == "pattern":
            assert isinstance(found, str)
            assert found.endswith("." + entry.name)
        else:
            assert entry.network is not None
            assert found in entry.network
        # The same entry in a deny-list refuses the host.
        assert not decide_name(NetworkRules(allow=None, deny=rules.allow or ()), host, port).allowed


# HTTP.


def http(data: bytes) -> None:
    """Parse request and response heads and the lengths of bodies."""
    for parse in (parse_request_head, parse_response_head):
        try:
            head: Any = parse(data)
            length = body_length(head.headers, minor=head.minor)
            forwarded = forwarded_headers(head.headers)
        except HttpFormatError:
            continue
        assert length is None or length == "chunked" or 0 <= int(length) < 10**18
        again = "".join(f"{key}: {value}\r\n" for key, value in forwarded)
        first = "GET / HTTP/1.1" if parse is parse_request_head else "HTTP/1.1 200 OK"
        encoded = f"{first}\r\n{again}\r\n".encode("latin-1")
        if len(encoded) < 60_000:
            assert parse(encoded).headers == forwarded
    with contextlib.suppress(HttpFormatError):
        host, port = split_authority(data.decode("latin-1"), default_port=80)
        assert host
        assert 1 <= port <= 65535
        assert not set(host) & set("@/\\?#%,")


def chunked(data: bytes) -> None:
    """Parse a chunked body: read sizes do not matter, and the output parses to the same body."""
    if not data:
        return
    step, data = 1 + data[0], data[1:]
    whole, cut = _feed(data, len(data) or 1), _feed(data, step)
    assert whole == cut
    if whole is None:
        return
    sent, rest = whole
    again = _feed(sent, len(sent) or 1)
    assert again is not None
    assert again == (sent, b"")
    assert data.endswith(rest)
    assert _payload(data) == _payload(sent)


def _payload(data: bytes) -> bytes:
    """Return the payload of a chunked body, in an independent, simpler implementation."""
    found = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        assert end
        size = int(line.partition(b";")[0], 16)
        if not size:
            return found
        found += data[:size]
        assert data[size : size + 2] == b"\r\n"
        data = data[size + 2 :]


def _feed(data: bytes, step: int) -> tuple[bytes, bytes] | None:
    body, out = ChunkedBody(), b""
    try:
        for at in range(0, len(data), step):
            out += body.feed(data[at : at + step])
            if body.done:
                return out, body.rest + data[at + step :]
    except HttpFormatError:
        return None
    return None


class _Wire:
    """Replaces the event loop's socket calls: input is given, output is stored."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data = data
        self.step = step
        self.sent = b""

    async def sock_recv(self, _sock: object, size: int) -> bytes:
        piece = self.data[: min(size, self.step)]
        self.data = self.data[len(piece) :]
        return piece

    async def sock_sendall(self, _sock: object, data: bytes) -> None:
        self.sent += data


class _Stream(Stream):
    def __init__(self, data: bytes, step: int = 4096) -> None:
        self.wire = _Wire(data, step)
        self.sock = None  # type: ignore[assignment]
        self._buffer = bytearray()
        self._loop = self.wire  # type: ignore[assignment]

    def shutdown_write(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Connection:
    """A connection whose allowed destinations all send the same response."""

    policy = Policy(RULES)
    upstream = None

    def __init__(self, data: bytes, answer: bytes, step: int) -> None:
        self.stream = _Stream(data, step)
        self.answer = answer
        self.dialled: list[tuple[str, int, _Stream]] = []
        self.accounted: list[Attempt] = []

    def begin_attempt(self, attempt: Attempt) -> Attempt:
        self.accounted.append(attempt)
        return attempt

    def request_received(self) -> None: ...

    async def dial(self, attempt: Attempt) -> OutboundConnection:
        attempt.verdict = self.policy.decide_name(attempt.host, attempt.port)
        if not attempt.verdict.allowed:
            raise RefusedError(attempt.verdict)
        server = _Stream(self.answer)
        self.dialled.append((attempt.host, attempt.port, server))
        assert may_reach(parse_host(attempt.host), attempt.port)
        return OutboundConnection(stream=server, address="", name=None, verdict=attempt.verdict)

    async def linger(self) -> None: ...


class _NoTunnel(HttpFrontend):
    async def _tunnel(self, connection: Any, attempt: Attempt) -> None:
        await connection.dial(attempt)


def http_proxy(data: bytes) -> None:
    """Serve a client of the HTTP proxy; the server's response follows after four NULs."""
    step = 1 + (data[0] if data else 0) * 16
    request, _, answer = data[1:].partition(b"\0\0\0\0")
    connection = _Connection(request, answer, step)
    frontend = _NoTunnel("me:secret" if data[:1] == b"\xff" else None)
    LOOP.run_until_complete(frontend.serve(connection))  # type: ignore[arg-type]
    for host, port, server in connection.dialled:
        if server.wire.sent:
            _check_forwarded(server.wire.sent, host, port)
    replied = connection.stream.wire.sent
    assert not replied or replied.startswith(b"HTTP/1.1 ")


def _check_forwarded(sent: bytes, host: str, port: int) -> None:
    """Check that the server gets one unambiguous request for the allowed destination."""
    end = sent.index(b"\r\n\r\n") + 4
    head, body = parse_request_head(sent[:end]), sent[end:]
    (named,) = head.values("host")
    host_field, port_field = split_authority(named, default_port=80)
    assert parse_host(host_field) == parse_host(host)
    assert port_field == port
    assert head.target.startswith("/")
    assert head.values("connection") == ["close"]
    for gone in ("proxy-authorization", "proxy-connection", "te", "trailer", "upgrade"):
        assert head.values(gone) == []
    # Checked independently of body_length, which accepted the request.
    assert len(head.values("content-length")) + len(head.values("transfer-encoding")) <= 1
    length = body_length(head.headers, minor=head.minor)
    if length == "chunked":
        reader = ChunkedBody()
        reader.feed(body)
        assert reader.rest == b""
    else:
        assert len(body) <= int(length or 0)


class _RefusedSocks(_Connection):
    async def dial(self, attempt: Attempt) -> OutboundConnection:
        outbound = await super().dial(attempt)
        raise DialError("unreachable", verdict=outbound.verdict)


def socks(data: bytes) -> None:
    """Serve a client of the SOCKS5 proxy."""
    login = "me:secret" if data[:1] == b"\1" else None
    connection = _RefusedSocks(data[1:], b"", 1 + len(data) % 7)
    LOOP.run_until_complete(SocksFrontend(login).serve(connection))  # type: ignore[arg-type]
    replied = connection.stream.wire.sent
    assert replied[:1] in {b"", b"\5"}
    if connection.dialled:
        assert replied[-10:-8] in {b"\5\4", b"\5\5"}
        if login:
            assert b"\2me\6secret" in data


# DNS.


def dns_query(data: bytes) -> None:
    """Send a datagram to the resolver: only an allowed name gets an address."""
    recorded: list[object] = []
    stub = StubResolver(Policy(RULES), SyntheticNames(), Ledger(recorded.append), ipv6=True)
    answer = stub.respond(data)
    if answer is None:
        assert len(data) < 12 or data[2] & 0x80
        return
    assert answer[:2] == data[:2]
    assert answer[2] & 0x80
    records = int.from_bytes(answer[6:8], "big")
    if not records:
        return
    query = dns.parse_query(data)
    name = query.name.lower().removesuffix(".")
    assert answer[12:].startswith(query.question)
    local = name == "localhost" or name.endswith(".localhost")
    assert local or may_reach(name, 80)


# TLS.


def tls_hello(data: bytes) -> None:
    """Parse a ClientHello: truncation and other record sizes do not change the result."""
    cut = data[0] if data else 0
    data = data[1:]
    try:
        hello = parse_client_hello(data)
    except TlsFormatError:
        return
    finally:
        tls.looks_like_tls(data)
        if cut < len(data):
            with contextlib.suppress(TlsFormatError):
                parse_client_hello(data[:cut])
    if hello is None:
        return
    if cut < len(data):
        assert parse_client_hello(data[:cut]) in {None, hello}
    message, at = b"", 0
    while at + 5 <= len(data) and data[at] == 0x16:
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
    message = message[: 4 + int.from_bytes(message[1:4], "big")]
    step = max(1, len(message) // 60, cut)
    pieces = [message[i : i + step] for i in range(0, len(message), step)]
    framed = b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in pieces)
    if len(pieces) <= 60 and step <= 16_384:
        assert parse_client_hello(framed) == hello
    if hello.server_name is not None:
        name = hello.server_name.encode("ascii")
        assert len(name).to_bytes(2, "big") + name in message, "the server name is in the message"
        verdict = decide_server_name(RULES, hello.server_name, 443, name="allowed.test")
        if verdict.allowed:
            assert may_reach(parse_host(hello.server_name), 443)


def addresses(data: bytes) -> None:
    """Parse numeric hosts: every spelling is the address that the C library parses."""
    text = data.decode("latin-1")
    found = check_name(text)
    if isinstance(found, ipaddress.IPv4Address) and text.isascii() and ":" not in text:
        import socket

        assert socket.inet_aton(text.removesuffix(".")) == found.packed
