"""Redirected connections, by name through a synthetic address or by address."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import SOON_S
from tests.net.harness import echo, read_all, rules, serving
from tests.unit.test_client_hello import client_hello

LOOPBACK = "127.0.0.0/8"


async def send_and_read(harness, data):
    """Send data and return the response; a refusal may already reset connect()."""
    try:
        reader, writer = await harness.connect("tcp_transparent")
    except ConnectionResetError:
        return b""
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(read_all(reader), 40)
    finally:
        writer.close()


def synthetic_address(harness, name):
    return str(harness.egress._dns._stub._names.addresses(name)[0])


async def test_a_listed_address_is_reached_and_recorded(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules([LOOPBACK]), destination=("127.0.0.1", port))
        assert await send_and_read(harness, b"hello") == b"hello"
        await harness.aclose()
    (decision,) = harness.decisions
    assert (decision.door, decision.host, decision.port) == ("tcp", "127.0.0.1", port)
    assert (decision.allowed, decision.rule, decision.address) == (True, LOOPBACK, "127.0.0.1")
    assert (decision.bytes_up, decision.bytes_down) == (5, 5)
    assert decision.duration_ms > 0


async def test_a_synthetic_address_is_checked_and_dialled_by_name(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        harness.destination = (synthetic_address(harness, "a.example"), port)
        assert await send_and_read(harness, b"hello") == b"hello"
        await harness.aclose()
    assert [(d.host, d.address) for d in harness.decisions] == [("a.example", "127.0.0.1")]


@pytest.mark.parametrize("address", ["203.0.113.9", "169.254.169.254", "10.0.0.1", "127.0.0.1"])
async def test_an_unlisted_address_is_reset_with_a_suggested_entry(open_egress, address, caplog):
    harness = open_egress(rules(["a.example"]), destination=(address, 80))

    async def connect_and_read():
        # The reset arrives during connect() or right after it.
        reader, writer = await harness.connect("tcp_transparent")
        try:
            await asyncio.wait_for(reader.read(), SOON_S)
        finally:
            writer.close()

    with pytest.raises(ConnectionResetError):
        await connect_and_read()
    (decision,) = harness.decisions
    assert (decision.allowed, decision.suggestion) == (False, f"{address}:80")
    (record,) = [r for r in caplog.records if r.name == "union.sandbox.network"]
    assert f"{address}:80" in record.getMessage()


async def test_a_connection_to_the_listener_itself_is_refused(open_egress):
    harness = open_egress(rules([LOOPBACK]))
    assert await send_and_read(harness, b"x") == b""
    assert [d.allowed for d in harness.decisions] == [False]


@pytest.mark.threat(91, 92)
async def test_a_name_that_rebinds_to_an_internal_address_is_refused(open_egress):
    harness = open_egress(
        rules(["a.example"]), table={"a.example": [["10.255.255.1"], ["127.0.0.1", "::1"]]}
    )
    harness.destination = (synthetic_address(harness, "a.example"), 80)
    assert await send_and_read(harness, b"x") == b""
    assert await send_and_read(harness, b"x") == b""
    assert [(d.allowed, d.rule) for d in harness.decisions] == [(False, "internal")] * 2


@pytest.mark.threat(94)
async def test_a_refused_server_name_is_reset_and_its_bytes_are_not_sent(open_egress):
    seen = bytearray()

    async def record(reader, writer):
        while data := await reader.read(65536):
            seen.extend(data)

    async with serving(record) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        harness.destination = (synthetic_address(harness, "a.example"), port)
        assert await send_and_read(harness, client_hello("hidden.example")) == b""
        assert not seen
        await send_and_read(harness, client_hello("a.example"))
        assert bytes(seen[:1]) == b"\x16"
        await harness.aclose()
    refused, fine = harness.decisions
    assert not refused.allowed
    assert refused.suggestion == f"hidden.example:{port}"
    assert refused.bytes_up == 0
    assert fine.allowed


async def test_a_client_hello_in_small_reads_is_checked_when_complete(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        harness.destination = (synthetic_address(harness, "a.example"), port)
        for name, arrives in (("a.example", True), ("hidden.example", False)):
            data = client_hello(name)
            reader, writer = await harness.connect("tcp_transparent")
            for at in range(0, len(data), 100):
                writer.write(data[at : at + 100])
                await asyncio.sleep(0.002)
            writer.write_eof()
            assert (await read_all(reader) == data) is arrives
            writer.close()


async def test_data_from_a_server_that_sends_first_arrives(open_egress):
    async def banner(reader, writer):
        writer.write(b"220 ready\r\n")
        await reader.read(1)

    async with serving(banner) as port:
        harness = open_egress(rules([LOOPBACK]), destination=("127.0.0.1", port))
        reader, writer = await harness.connect("tcp_transparent")
        assert await asyncio.wait_for(reader.readline(), SOON_S) == b"220 ready\r\n"
        writer.close()


async def test_an_unreachable_destination_is_reset_and_the_error_is_recorded(open_egress):
    async with serving(echo) as port:
        pass
    harness = open_egress(rules([LOOPBACK]), destination=("127.0.0.1", port))
    assert await send_and_read(harness, b"x") == b""
    (decision,) = harness.decisions
    assert decision.allowed
    assert "refused" in decision.error
