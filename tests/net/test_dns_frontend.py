"""The stub resolver: allowed names get a synthetic address and no query is forwarded."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from tests.conftest import SOON_S
from tests.net.harness import rules

from union.sandbox._codecs import dns

OPT = struct.pack(">BHHIH", 0, 41, 1232, 0, 0)


def query(name, kind=dns.A, *, opt=b""):
    head = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 1 if opt else 0)
    return head + dns.encode_name(name) + struct.pack(">HH", kind, 1) + opt


async def send_query(harness, data):
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", harness.ports["dns_udp"]))
        await loop.sock_sendall(sock, data)
        return await asyncio.wait_for(loop.sock_recv(sock, 4096), SOON_S)


def rcode(answer):
    return answer[3] & 0xF


async def test_an_allowed_name_has_one_stable_address(open_egress):
    harness = open_egress(rules(["a.example", "*.b.example:443"]))
    first = await send_query(harness, query("a.example"))
    assert first[-4:-2] == bytes((198, 18))
    assert await send_query(harness, query("A.Example")) != first
    assert (await send_query(harness, query("A.Example")))[-4:] == first[-4:]
    other = await send_query(harness, query("x.b.example"))
    assert other[-4:-2] == bytes((198, 18))
    assert other[-4:] != first[-4:]
    assert harness.resolver.queries == []
    assert harness.decisions == []


@pytest.mark.threat(80)
@pytest.mark.parametrize(
    "name", ["secret-data.evil.example", "b.example", "127.1", "a.example.evil"]
)
async def test_other_names_get_nxdomain_and_are_not_forwarded(open_egress, name):
    harness = open_egress(rules(["a.example", "*.b.example"]))
    answer = await send_query(harness, query(name, opt=OPT))
    assert rcode(answer) == dns.NXDOMAIN
    await send_query(harness, query(name, dns.AAAA))
    assert harness.resolver.queries == []
    (decision,) = harness.decisions
    assert (decision.door, decision.host, decision.allowed) == ("dns", name, False)


async def test_clients_with_edns_receive_the_reason(open_egress):
    harness = open_egress(rules(["a.example"]))
    assert b"evil.example is not on the allow-list" in await send_query(
        harness, query("evil.example", opt=OPT)
    )


@pytest.mark.parametrize("kind", [dns.AAAA, 15, 16, 65])
async def test_other_record_types_of_an_allowed_name_are_empty(open_egress, kind):
    answer = await send_query(open_egress(rules(["a.example"])), query("a.example", kind))
    assert (rcode(answer), answer[6:8]) == (dns.NOERROR, b"\0\0")


async def test_localhost_resolves_to_loopback(open_egress):
    assert (await send_query(open_egress(rules([])), query("localhost")))[-4:] == bytes(
        (127, 0, 0, 1)
    )


async def test_reverse_lookups_resolve_only_synthetic_addresses(open_egress):
    harness = open_egress(rules(["a.example"]))
    address = (await send_query(harness, query("a.example")))[-4:]
    reverse = ".".join(str(byte) for byte in reversed(address)) + ".in-addr.arpa"
    assert (await send_query(harness, query(reverse, dns.PTR))).endswith(
        dns.encode_name("a.example")
    )
    assert rcode(await send_query(harness, query("1.0.0.10.in-addr.arpa", dns.PTR))) == dns.NXDOMAIN
    assert harness.decisions == []


async def test_open_with_a_deny_list_resolves_all_other_names(open_egress):
    harness = open_egress(rules(None, ["*.evil.example"]))
    assert rcode(await send_query(harness, query("any.example"))) == dns.NOERROR
    assert rcode(await send_query(harness, query("x.evil.example"))) == dns.NXDOMAIN


async def test_queries_over_tcp(open_egress):
    harness = open_egress(rules(["a.example"]))
    reader, writer = await harness.connect("dns_tcp")
    for name, code in (("a.example", dns.NOERROR), ("evil.example", dns.NXDOMAIN)):
        data = query(name)
        writer.write(len(data).to_bytes(2, "big") + data)
        size = int.from_bytes(await reader.readexactly(2), "big")
        assert rcode(await reader.readexactly(size)) == code
    writer.close()


async def test_a_malformed_query_gets_formerr_and_the_next_query_is_served(open_egress):
    harness = open_egress(rules(["a.example"]))
    assert rcode(await send_query(harness, query("a.example") + b"junk")) == dns.FORMERR
    assert rcode(await send_query(harness, query("a.example"))) == dns.NOERROR
