"""Replacing the rules of an egress affects every frontend and connection immediately."""

from __future__ import annotations

import asyncio

import pytest
from tests.net.harness import echo, policy, read_all, rules, serving
from tests.net.test_dns_frontend import query, send_query

LOOPBACK = "127.0.0.0/8"
TABLE = {"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]}


async def tunnel_to(harness, name, port):
    reader, writer = await harness.connect("http")
    writer.write(f"CONNECT {name}:{port} HTTP/1.1\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 40)
    return head, reader, writer


@pytest.mark.spec("F3")
async def test_what_the_new_rules_refuse_is_reset_and_the_rest_goes_on(open_egress):
    received = bytearray()

    async def record(reader, writer):
        while data := await reader.read(65536):
            received.extend(data)
            writer.write(data)

    async with serving(record) as port:
        harness = open_egress(rules(["a.example", "b.example", LOOPBACK]), table=TABLE)
        _, kept, kept_writer = await tunnel_to(harness, "a.example", port)
        _, cut, cut_writer = await tunnel_to(harness, "b.example", port)
        for reader, writer in ((kept, kept_writer), (cut, cut_writer)):
            writer.write(b"before")
            assert await asyncio.wait_for(reader.readexactly(6), 40) == b"before"
        harness.egress.switch(rules(["a.example", LOOPBACK]))
        received.clear()
        cut_writer.write(b"secret")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(cut.readexactly(1), 40)
        kept_writer.write(b"after")
        assert await asyncio.wait_for(kept.readexactly(5), 40) == b"after"
        assert bytes(received) == b"after", "no byte of the revoked connection arrives"
        head, _, writer = await tunnel_to(harness, "b.example", port)
        assert head.startswith(b"HTTP/1.1 403 ")
        for other in (writer, kept_writer, cut_writer):
            other.close()
        await harness.aclose()
    by_host = {d.host: d.error for d in harness.decisions if d.allowed}
    assert "change of the network policy" in by_host["b.example"]
    assert not by_host["a.example"]


async def test_names_resolve_by_the_rules_in_force(open_egress):
    harness = open_egress(rules(["a.example"]))
    before = await send_query(harness, query("a.example"))
    assert before[3] & 0x0F == 0
    harness.egress.switch(rules(["b.example"]))
    assert (await send_query(harness, query("a.example")))[3] & 0x0F == 3
    assert (await send_query(harness, query("b.example")))[3] & 0x0F == 0


async def test_an_address_denied_by_the_new_rules_resets_a_connection_by_name(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table=TABLE)
        _, reader, writer = await tunnel_to(harness, "a.example", port)
        harness.egress.switch(rules(["a.example", LOOPBACK], [LOOPBACK]))
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.readexactly(1), 40)
        writer.close()


@pytest.mark.parametrize("is_switched", [True, False])
async def test_a_pending_dial_is_checked_by_the_rules_at_its_end(open_egress, is_switched):
    """Control: the same dial succeeds without a switch."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        async def resolve(self, name):
            asked.set()
            await go_on.wait()
            return ["127.0.0.1"]

    async with serving(echo) as port:
        harness = open_egress(policy(["a.example", LOOPBACK]), resolver=Slow())
        pending = asyncio.create_task(tunnel_to(harness, "a.example", port))
        await asyncio.wait_for(asked.wait(), 40)
        if is_switched:
            harness.egress.switch(rules(["b.example"]))
        go_on.set()
        if is_switched:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(pending, 40)
        else:
            head, _, writer = await asyncio.wait_for(pending, 40)
            assert b" 200 " in head
            writer.close()


@pytest.mark.parametrize("end", ["suspend", "close"])
async def test_an_attempt_that_ends_before_it_is_connected_is_recorded(open_egress, end):
    asked = asyncio.Event()

    class Endless:
        async def resolve(self, _name):
            asked.set()
            await asyncio.Event().wait()

    harness = open_egress(policy(["a.example", LOOPBACK]), resolver=Endless())
    pending = asyncio.create_task(tunnel_to(harness, "a.example", 443))
    await asyncio.wait_for(asked.wait(), 40)
    getattr(harness.egress, end)()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(pending, 40)
    await harness.aclose()
    [decision] = harness.decisions
    assert (decision.host, decision.port, decision.allowed) == ("a.example", 443, True)
    assert decision.address == ""
    assert "suspended" in decision.error if end == "suspend" else "before" in decision.error


async def test_a_plain_request_in_progress_is_reset(open_egress):
    started = asyncio.Event()

    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        started.set()
        for _ in range(1000):
            writer.write(b"x" * 100)
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(drip) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table=TABLE)
        reader, writer = await harness.connect("http")
        host = f"a.example:{port}"
        writer.write(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        await asyncio.wait_for(started.wait(), 40)
        await reader.readuntil(b"\r\n\r\n")
        harness.egress.switch(rules([]))
        assert len(await asyncio.wait_for(read_all(reader), 40)) < 10_000
        writer.close()


async def test_the_decision_limit_restarts(open_egress, monkeypatch):
    monkeypatch.setattr("union.sandbox._net.ledger._MAX_DECISIONS", 1)
    harness = open_egress(rules([]))
    for _ in range(2):
        for _ in range(2):
            await harness.http(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n")
        harness.egress.switch(rules([]))
    assert (len(harness.decisions), harness.egress.unrecorded) == (2, 2)
