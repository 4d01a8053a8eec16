"""A server for one session: its orders, its two kinds of callers, and who holds it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import time

import pytest

from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Authority, Grant
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._supervised import OwnerLease, read_orders, with_orders

SESSION = "ab" * 16
ORDERS = {
    "session": SESSION,
    "told": {"network_mode": "blocked"},
    "owner_sha256": hashlib.sha256(b"owner").hexdigest(),
    "guest_sha256": hashlib.sha256(b"guest").hexdigest(),
    "expires": time.time() + 3600,  # from the import on, not from the test
}


def through_a_pipe(data: bytes) -> dict[str, object]:
    ours, theirs = os.pipe()
    os.write(theirs, data)
    os.close(theirs)
    try:
        return read_orders(ours)
    finally:
        os.close(ours)


def config(**changes: object):
    supervised = config_from_arguments(["--supervised", "--bind", "10.0.0.1:1"], {})
    return with_orders(supervised, {**ORDERS, **changes})


def test_orders_are_one_line():
    assert through_a_pipe(json.dumps(ORDERS).encode() + b"\n") == ORDERS


@pytest.mark.parametrize("data", [b"", b"{}", b"no\n", b"[]\n", b'{"other": 1}\n'])
def test_what_is_no_order(data):
    with pytest.raises(SandboxUsageError, match="--supervised"):
        through_a_pipe(data)


@pytest.mark.parametrize("missing", ["session", "told", "owner_sha256", "guest_sha256"])
def test_incomplete_orders(missing):
    supervised = config_from_arguments(["--supervised"], {})
    told = {k: v for k, v in ORDERS.items() if k != missing}
    with pytest.raises(SandboxUsageError, match="incomplete"):
        with_orders(supervised, told)


@pytest.mark.parametrize("line", ["5", -1, 1 << 20])
def test_a_line_must_be_a_socket_that_was_handed_down(line):
    with pytest.raises(SandboxUsageError, match="incomplete"):
        config(line=line)


def test_a_line_is_not_handed_on():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.set_inheritable(True)
        line = config(line=theirs.detach()).line
        assert line is not None
        with line:
            assert not line.get_inheritable()
            ours.sendall(b"x")
            assert line.recv(1) == b"x"


def test_a_verifier_must_be_one():
    with pytest.raises(SandboxUsageError):
        config(guest_sha256="short")


def test_it_brings_its_own_tokens():
    with pytest.raises(SandboxUsageError, match="its own tokens"):
        config_from_arguments(["--supervised"], {"SANDBOX_SERVER_TOKEN": "x" * 20})


@pytest.mark.spec("I5")
def test_the_owner_may_everything_the_guest_one_session():
    made = config()
    authority = Authority(made.verifier, made.guest)
    assert authority.judge("Bearer owner") == Grant()
    assert authority.judge("Bearer guest") == Grant(SESSION)
    assert authority.judge("Bearer other") is None
    assert authority.judge(f"Bearer {ORDERS['owner_sha256']}") is None
    assert authority.judge(f"Bearer {ORDERS['guest_sha256']}") is None


@pytest.mark.spec("I5")
def test_a_guest_is_one_for_a_time():
    made = config(expires=time.time() - 1)
    assert Authority(made.verifier, made.guest).judge("Bearer guest") is None


@pytest.mark.parametrize("told", [1, [1], [1, 2, 3], ["a", "b"], "no"])
def test_a_lease_that_cannot_be_read(told):
    with pytest.raises(SandboxUsageError, match="incomplete"):
        config(owner_lease=told)


@pytest.mark.slow
async def test_an_owner_that_is_heard_keeps_its_server():
    made = config(owner_lease=[2.0, 2.0])
    assert made.fixed is not None
    assert made.fixed.owner_lease == (2.0, 2.0)
    authority = Authority(made.verifier, made.guest)
    ended = asyncio.Event()
    lease = OwnerLease(made.fixed.owner_lease, authority, ended.set)
    for _ in range(20):
        await asyncio.sleep(0.2)
        assert authority.judge("Bearer owner") is not None
    assert not ended.is_set(), "for twice the lease"
    async with asyncio.timeout(10):
        await ended.wait()
    lease.close()


async def test_a_guest_does_not_keep_the_server():
    made = config(owner_lease=[0.2, 0.2])
    authority = Authority(made.verifier, made.guest)
    ended = asyncio.Event()
    lease = OwnerLease((0.2, 0.2), authority, ended.set)
    async with asyncio.timeout(10):
        while not ended.is_set():
            assert authority.judge("Bearer guest") is not None
            assert authority.judge("Bearer nobody") is None
            await asyncio.sleep(0.02)
    lease.close()


async def test_an_owner_may_take_longer_to_come():
    authority = Authority(config().verifier)
    ended = asyncio.Event()
    lease = OwnerLease((0.05, 30.0), authority, ended.set)
    await asyncio.sleep(0.3)
    assert not ended.is_set()
    assert authority.judge("Bearer owner") is not None
    async with asyncio.timeout(10):
        await ended.wait()
    lease.close()
