from __future__ import annotations

import asyncio
import struct

import pytest
from tests.conftest import SOON_S
from tests.net.harness import echo, read_all, rules, serving

LOOPBACK = "127.0.0.0/8"


def by_name(name, port, command=1):
    raw = name if isinstance(name, bytes) else name.encode()
    return bytes((5, command, 0, 3, len(raw))) + raw + struct.pack(">H", port)


def by_address(packed, port):
    return bytes((5, 1, 0, 1 if len(packed) == 4 else 4)) + packed + struct.pack(">H", port)


async def socks_connect(harness, request, payload=b""):
    reader, writer = await harness.connect("socks")
    writer.write(b"\x05\x01\x00")
    assert await reader.readexactly(2) == b"\x05\x00"
    writer.write(request)
    reply = await asyncio.wait_for(reader.readexactly(10), 40)
    answer = b""
    if reply[1] == 0:
        writer.write(payload)
        writer.write_eof()
        answer = await asyncio.wait_for(read_all(reader), 40)
    writer.close()
    return reply[1], answer


async def test_names_and_addresses(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules(["a.example", LOOPBACK]), table={"a.example": ["127.0.0.1"]})
        assert await socks_connect(harness, by_name("A.example.", port), b"one") == (0, b"one")
        assert await socks_connect(harness, by_address(b"\x7f\0\0\1", port), b"two") == (0, b"two")
        mapped = bytes(10) + b"\xff\xff\x7f\0\0\1"
        assert await socks_connect(harness, by_address(mapped, port), b"three") == (0, b"three")
        assert await socks_connect(harness, by_name("127.1", port), b"four") == (0, b"four")


@pytest.mark.threat(80, 84)
@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "10.0.0.1",
        "0x7f.1",
        "::1",
        b"a.example\0.evil",
        b"a.example\0",
        b"a.example ",
        b"a.example\r\n",
        b"\xff\xfe",
        b"",
        "metadata.google.internal",
        "a.example/x",
        "u@a.example",
    ],
)
async def test_refused_names_are_not_resolved(open_egress, name):
    harness = open_egress(rules(["a.example"]), table={"a.example": ["127.0.0.1"]})
    assert (await socks_connect(harness, by_name(name, 80)))[0] == 2
    assert harness.resolver.queries == []
    (decision,) = harness.decisions
    assert (decision.door, decision.allowed) == ("socks", False)
    assert decision.host.isprintable()


@pytest.mark.threat(91)
@pytest.mark.parametrize("inner", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "0.0.0.0"])
async def test_an_allowed_name_with_an_internal_address_is_refused(open_egress, inner):
    harness = open_egress(rules(["a.example"]), table={"a.example": [inner]})
    assert (await socks_connect(harness, by_name("a.example", 80)))[0] == 2


@pytest.mark.threat(97)
@pytest.mark.parametrize("command", [2, 3, 9])
async def test_only_connect_is_served(open_egress, command):
    harness = open_egress(rules(["a.example"]))
    assert (await socks_connect(harness, by_name("a.example", 80, command)))[0] == 7


async def test_unreachable_is_not_reported_as_refused(open_egress):
    async with serving(echo) as port:
        pass
    harness = open_egress(rules([LOOPBACK, "gone.example"]))
    assert (await socks_connect(harness, by_address(b"\x7f\0\0\1", port)))[0] == 5
    assert (await socks_connect(harness, by_name("gone.example", port)))[0] == 4
    assert [d.allowed for d in harness.decisions] == [True, True]
    assert all(d.error for d in harness.decisions)


@pytest.mark.threat(96)
async def test_configured_credentials_are_required(open_egress):
    async with serving(echo) as port:
        harness = open_egress(rules([LOOPBACK]), credentials="run:secret")
        reader, writer = await harness.connect("socks")
        writer.write(b"\x05\x01\x00")
        assert await reader.readexactly(2) == b"\x05\xff"
        writer.close()
        for password, fine in ((b"secret", True), (b"wrong", False)):
            reader, writer = await harness.connect("socks")
            writer.write(b"\x05\x02\x00\x02")
            assert await reader.readexactly(2) == b"\x05\x02"
            writer.write(b"\x01\x03run" + bytes((len(password),)) + password)
            assert (await reader.readexactly(2) == b"\x01\x00") is fine
            if fine:
                writer.write(by_address(b"\x7f\0\0\1", port))
                assert (await reader.readexactly(10))[1] == 0
            writer.close()


async def test_other_versions_are_disconnected(open_egress):
    harness = open_egress(rules([]))
    reader, writer = await harness.connect("socks")
    writer.write(b"\x04\x01\x00\x50\x7f\0\0\1\0")
    assert await asyncio.wait_for(read_all(reader), SOON_S) == b""
    writer.close()
