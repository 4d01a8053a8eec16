"""Connections beyond a session's share are refused, so other sessions keep descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from ipaddress import ip_address

import pytest
from tests.conftest import SOON_S
from tests.net.harness import echo, policy, read_all, rules, serving

from union.sandbox._net.budget import PER_CONNECTION, Budget
from union.sandbox._net.happy_eyeballs import connect_any

LOOPBACK = "127.0.0.0/8"


async def tunnel_to(harness, port):
    reader, writer = await harness.connect("http")
    writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 40)
    return reader, writer


@pytest.mark.threat(156)
def test_a_session_gets_half_of_the_free_descriptors():
    budget = Budget(64)
    first, second, third = budget.share(), budget.share(), budget.share()
    for share, wanted in ((first, 32), (second, 16), (third, 8)):
        while share.acquire(1):
            pass
        assert share.held == wanted
    first.release(32)
    assert second.acquire(1), "released descriptors are available to others"
    assert budget.held == second.held + third.held


def test_the_budget_follows_the_limit_of_the_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    budget = Budget()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert budget.total == 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 20_000), hard))
        assert budget.total <= 8192
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.threat(156)
@pytest.mark.parametrize("frontend", ["http", "socks", "tcp_transparent", "dns_tcp"])
async def test_a_greedy_session_is_refused_and_another_is_served(open_egress, frontend):
    async with serving(echo) as port:
        budget = Budget(8 * PER_CONNECTION)
        destination = ("127.0.0.1", port)
        greedy = open_egress(rules([LOOPBACK]), share=budget.share(), destination=destination)
        modest = open_egress(rules([LOOPBACK]), share=budget.share())
        held = [await tunnel_to(greedy, port) for _ in range(4)]
        with contextlib.suppress(ConnectionResetError):
            reader, writer = await greedy.connect(frontend)
            assert await asyncio.wait_for(read_all(reader), SOON_S) == b""
            writer.close()
        refusal = greedy.decisions[-1]
        assert (refusal.allowed, refusal.rule) == (False, "budget")
        assert "share" in refusal.reason
        if frontend == "tcp_transparent":
            assert (refusal.host, refusal.port) == destination
        # Control: another session has room, and the budget is empty after both are closed.
        held += [await tunnel_to(modest, port) for _ in range(2)]
        for _reader, writer in held:
            writer.close()
        for harness in (greedy, modest):
            await harness.aclose()
        assert budget.held == 0


async def test_parallel_attempts_use_the_share():
    """Eight unresponsive addresses use no more descriptors than the share has."""
    budget = Budget(4)
    share = budget.share()
    assert share.acquire(1)
    addresses = [ip_address(f"192.0.2.{number}") for number in range(100, 108)]
    task = asyncio.create_task(connect_any(addresses, 9, share=share))
    await asyncio.sleep(0.8)
    assert share.held <= 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert share.held == 1


@pytest.mark.threat(156)
async def test_a_direction_buffers_one_bounded_read(open_egress, monkeypatch):
    """A stalled sink holds only the last read, however much is transferred."""
    loop = asyncio.get_running_loop()
    real, sizes = loop.sock_recv, []

    async def sock_recv(sock, size):
        data = await real(sock, size)
        sizes.append((size, len(data)))
        return data

    monkeypatch.setattr(loop, "sock_recv", sock_recv)
    async with serving(echo) as port:
        harness = open_egress(policy([LOOPBACK]))
        reader, writer = await tunnel_to(harness, port)
        sizes.clear()
        payload = bytes(8 * 1024 * 1024)

        async def pour():
            writer.write(payload)
            await writer.drain()
            writer.write_eof()

        pouring = asyncio.create_task(pour())
        assert len(await asyncio.wait_for(read_all(reader), 30)) == len(payload)
        await pouring
        writer.close()
        await harness.aclose()
    assert max(limit for limit, _size in sizes) <= 64 * 1024
    assert sum(size for _limit, size in sizes) >= 2 * len(payload), (
        "control: all data was read here"
    )
