"""A name is resolved once, every address is checked, and a checked address is dialled."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.conftest import SOON_S
from tests.net.harness import FakeResolver, echo, policy, serving

from union.sandbox._net.dialer import Dialer, DialError, RefusedError
from union.sandbox._net.happy_eyeballs import HostResolver


@pytest.mark.threat(91, 92)
async def test_only_addresses_that_pass_are_dialled():
    async with serving(echo) as port:
        resolver = FakeResolver({"a.example": ["10.0.0.1", "::1", "127.0.0.1", "fe80::1%1"]})
        dialer = Dialer(policy(["a.example", "127.0.0.1"]), resolver=resolver)
        outbound = await dialer.dial("a.example", port)
        assert (outbound.address, outbound.name) == ("127.0.0.1", "a.example")
        assert outbound.verdict.rule == "127.0.0.1"
        assert resolver.queries == ["a.example"]
        outbound.stream.close()


async def test_a_refused_first_address_costs_little_time():
    async with serving(echo) as port:
        dialer = Dialer(
            policy(["a.example", "127.0.0.0/8", "::1"]),
            resolver=FakeResolver({"a.example": ["::1", "127.0.0.2", "127.0.0.1"]}),
        )
        outbound = await asyncio.wait_for(dialer.dial("a.example", port), SOON_S)
        assert outbound.address in {"127.0.0.1", "127.0.0.2"}
        outbound.stream.close()


async def test_an_unresponsive_address_does_not_block_the_next(monkeypatch):
    full = socket.socket()
    full.bind(("127.0.0.3", 0))
    full.listen(0)
    port = full.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.3", port))
        fillers.append(filler)
    good = socket.socket()
    good.bind(("127.0.0.4", port))
    good.listen(1)
    dialer = Dialer(
        policy(["a.example", "127.0.0.0/8"]),
        resolver=FakeResolver({"a.example": ["127.0.0.3", "127.0.0.4"]}),
    )
    outbound = await asyncio.wait_for(dialer.dial("a.example", port), SOON_S)
    assert outbound.address == "127.0.0.4"
    outbound.stream.close()
    for sock in (full, good, *fillers):
        sock.close()


@pytest.mark.threat(92)
async def test_a_resolver_that_hangs_or_fails_is_a_dial_error(monkeypatch):
    monkeypatch.setattr("union.sandbox._net.dialer.RESOLVE_TIMEOUT_S", 0.05)

    class Hanging:
        async def resolve(self, name):
            await asyncio.sleep(60)

    with pytest.raises(DialError, match="timed out"):
        await Dialer(policy(["a.example"]), resolver=Hanging()).dial("a.example", 80)
    for table in ({}, {"a.example": []}, {"a.example": ["junk", "fe80::1%1"]}):
        with pytest.raises(DialError):
            await Dialer(policy(["a.example"]), resolver=FakeResolver(table)).dial("a.example", 80)


@pytest.mark.threat(91)
async def test_only_internal_addresses_is_a_refusal_with_a_suggestion():
    dialer = Dialer(
        policy(["a.example"]), resolver=FakeResolver({"a.example": ["10.0.0.1", "127.0.0.1"]})
    )
    with pytest.raises(RefusedError) as info:
        await dialer.dial("a.example", 80)
    assert info.value.verdict.suggestion == "10.0.0.1:80"


async def test_a_denied_address_is_not_dialled_for_an_allowed_name():
    dialer = Dialer(
        policy(["a.example", "127.0.0.0/8"], ["127.0.0.1"]),
        resolver=FakeResolver({"a.example": ["127.0.0.1"]}),
    )
    with pytest.raises(RefusedError, match=r"denied by 127\.0\.0\.1"):
        await dialer.dial("a.example", 80)


async def test_the_host_resolver_resolves_localhost():
    assert set(await HostResolver("a test").resolve("localhost")) & {"127.0.0.1", "::1"}
