"""A supervised server: its launch document, its owner and guest keys, its owner lease."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import socket
import time

import pytest

from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Authority, Grant
from union.sandbox.server._config import Config, config_from_arguments
from union.sandbox.server._supervised import OwnerLease, apply_launch_spec, read_launch_spec

SESSION = "ab" * 16
SPEC = LaunchSpec(
    session=SESSION,
    session_arguments={"network_mode": "blocked"},
    owner_sha256=hashlib.sha256(b"owner").hexdigest(),
    guest_sha256=hashlib.sha256(b"guest").hexdigest(),
    expires=time.time() + 3600,
)


def read_from_pipe(data: bytes) -> LaunchSpec:
    ours, theirs = os.pipe()
    os.write(theirs, data)
    os.close(theirs)
    try:
        return read_launch_spec(ours)
    finally:
        os.close(ours)


def config(**changes: object) -> Config:
    supervised = config_from_arguments(["--supervised", "--bind", "10.0.0.1:1"], {})
    return apply_launch_spec(supervised, dataclasses.replace(SPEC, **changes))  # type: ignore[arg-type]


def test_the_first_line_of_stdin_is_the_launch_document():
    assert read_from_pipe(SPEC.encode()) == SPEC


@pytest.mark.parametrize("data", [b"", b"{}", b"no\n", b"[]\n", b'{"other": 1}\n'])
def test_invalid_launch_documents_are_refused(data: bytes):
    with pytest.raises(SandboxUsageError, match="--supervised"):
        read_from_pipe(data)


@pytest.mark.parametrize("fd", [-1, 1 << 20, 1 << 70])
def test_the_owner_socket_must_be_an_inherited_socket(fd: int):
    with pytest.raises(SandboxUsageError, match="owner_socket must be an inherited socket"):
        config(owner_socket=fd)


def test_the_owner_socket_is_not_inheritable():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.set_inheritable(True)
        sock = config(owner_socket=theirs.detach()).owner_socket
        assert sock is not None
        with sock:
            assert not sock.get_inheritable()
            ours.sendall(b"x")
            assert sock.recv(1) == b"x"


def test_a_digest_must_have_64_hexadecimal_digits():
    with pytest.raises(SandboxUsageError, match="guest_sha256 must be 64 hexadecimal digits"):
        config(guest_sha256="short")


def test_supervised_does_not_accept_a_token():
    with pytest.raises(SandboxUsageError, match="its own tokens"):
        config_from_arguments(["--supervised"], {"SANDBOX_SERVER_TOKEN": "x" * 20})


@pytest.mark.spec("I5")
def test_the_owner_has_all_rights_and_the_guest_one_session():
    made = config()
    authority = Authority(made.verifier, made.guest)
    assert authority.authenticate("Bearer owner") == Grant()
    assert authority.authenticate("Bearer guest") == Grant(SESSION)
    assert authority.authenticate("Bearer other") is None
    assert authority.authenticate(f"Bearer {SPEC.owner_sha256}") is None
    assert authority.authenticate(f"Bearer {SPEC.guest_sha256}") is None


@pytest.mark.spec("I5")
def test_the_guest_key_expires():
    made = config(expires=time.time() - 1)
    assert Authority(made.verifier, made.guest).authenticate("Bearer guest") is None


@pytest.mark.slow
async def test_requests_of_the_owner_renew_the_lease():
    made = config(owner_lease=(2.0, 2.0))
    assert made.launch is not None
    assert made.launch.owner_lease == (2.0, 2.0)
    authority = Authority(made.verifier, made.guest)
    ended = asyncio.Event()
    lease = OwnerLease(made.launch.owner_lease, authority, ended.set)
    for _ in range(20):
        await asyncio.sleep(0.2)
        assert authority.authenticate("Bearer owner") is not None
    assert not ended.is_set(), "for twice the lease"
    async with asyncio.timeout(40):
        await ended.wait()
    lease.close()


async def test_requests_of_a_guest_do_not_renew_the_lease():
    made = config(owner_lease=(0.2, 0.2))
    authority = Authority(made.verifier, made.guest)
    ended = asyncio.Event()
    lease = OwnerLease((0.2, 0.2), authority, ended.set)
    async with asyncio.timeout(40):
        while not ended.is_set():
            assert authority.authenticate("Bearer guest") is not None
            assert authority.authenticate("Bearer unknown") is None
            await asyncio.sleep(0.02)
    lease.close()


async def test_the_first_request_of_the_owner_has_its_own_timeout():
    authority = Authority(config().verifier)
    ended = asyncio.Event()
    lease = OwnerLease((0.05, 30.0), authority, ended.set)
    await asyncio.sleep(0.3)
    assert not ended.is_set()
    assert authority.authenticate("Bearer owner") is not None
    async with asyncio.timeout(40):
        await ended.wait()
    lease.close()
