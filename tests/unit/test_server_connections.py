"""The connection limiter, the acceptor and the queue of TLS handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest

from union.sandbox.errors import SandboxConnectionError
from union.sandbox.server import _connections
from union.sandbox.server._auth import Grant
from union.sandbox.server._connections import (
    Acceptor,
    Connection,
    ConnectionLimiter,
    connection_limit,
    raise_file_limit,
)
from union.sandbox.server._handshakes import HandshakeQueue, sends_client_hello
from union.sandbox.server._metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNER, GUEST = Grant(), Grant("s", "guest")


class Limiter(ConnectionLimiter):
    """Records the connections that it closes."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, header_timeout_s=60, metrics=Metrics())
        self.closed: list[Connection] = []

    def accept(self, peer: str = "a") -> Connection:
        connection = self.open(peer)
        connection.close = lambda: self.closed.append(connection)
        return connection

    def accept_with(self, grant: Grant) -> Connection:
        connection = self.accept()
        self.request_received(connection)
        self.authenticated(connection, grant)
        return connection


@pytest.mark.threat(152)
async def test_connections_without_a_key_are_closed_to_make_room():
    limiter = Limiter(100)
    unknown = [limiter.accept() for _ in range(100)]
    owner = limiter.accept()
    assert limiter.closed == unknown[:1]
    limiter.authenticated(owner, OWNER)
    for _ in range(1000):
        limiter.accept()
    assert owner.state == "busy", "a connection with a key is not closed"
    assert len(limiter) == 100


@pytest.mark.threat(152)
async def test_the_peer_with_the_most_connections_loses_one():
    limiter = Limiter(100)
    quiet = limiter.accept("b")
    for _ in range(5000):
        limiter.accept("a")
    assert quiet.state == "new"
    assert {connection.peer for connection in limiter.closed} == {"a"}


@pytest.mark.threat(152)
async def test_idle_connections_make_room_and_busy_ones_do_not():
    limiter = Limiter(50)
    kept = [limiter.accept_with(OWNER) for _ in range(50)]
    late = limiter.accept()
    with pytest.raises(SandboxConnectionError) as caught:
        limiter.authenticated(late, OWNER)
    assert caught.value.code == "busy"
    assert limiter.closed == [], "the reserve is for connections whose key is not checked yet"
    limiter.request_finished(kept[3])
    limiter.request_finished(kept[1])
    limiter.authenticated(late, OWNER)
    assert limiter.closed == [kept[3]], "the connection that was idle for the longest time"
    for _ in range(1000):
        limiter.accept()
    assert [connection.state for connection in kept].count("busy") == 48
    assert len(limiter) <= 50 + 16


@pytest.mark.threat(152)
async def test_a_limited_key_cannot_use_all_connections():
    limiter = Limiter(100)
    guests = 0
    with contextlib.suppress(SandboxConnectionError):
        for _ in range(101):
            limiter.accept_with(GUEST)
            guests += 1
    assert guests == 25
    others = 0
    with contextlib.suppress(SandboxConnectionError):
        for number in range(101):
            limiter.accept_with(Grant("s", f"capability:{number}"))
            others += 1
    assert guests + others == 50
    for _ in range(50):
        limiter.accept_with(OWNER)


async def test_counts_return_to_zero():
    limiter = Limiter(20)
    made = [limiter.accept_with(grant) for grant in (OWNER, GUEST, GUEST) for _ in range(1)]
    made += [limiter.accept("b"), limiter.accept("c")]
    limiter.request_finished(made[1])
    limiter.request_received(made[1])
    limiter.authenticated(made[1], OWNER)
    for connection in made:
        limiter.connection_closed(connection)
        limiter.connection_closed(connection)
    assert len(limiter) == 0
    assert limiter._limited == 0
    assert not limiter._by_key
    assert not limiter._new
    with pytest.raises(ConnectionResetError):
        limiter.authenticated(made[0], OWNER)


async def test_a_connection_without_a_key_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_connections, "_RESPONSE_TIMEOUT_S", 0.01)
    limiter = Limiter(10)
    without_key, with_key = limiter.accept(), limiter.accept()
    limiter.request_received(without_key)
    limiter.request_received(with_key)
    limiter.authenticated(with_key, OWNER)
    async with asyncio.timeout(40):
        while not limiter.closed:
            await asyncio.sleep(0.01)
    assert limiter.closed == [without_key]


@pytest.mark.parametrize(
    "address, peer",
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("::ffff:192.0.2.1", 1, 0, 0), "192.0.2.1"),
        (("2001:db8:1:2:3::4", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::4", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%lo", 1, 0, 1), "fe80::/64"),
        ("", "unix"),
    ],
)
def test_addresses_that_count_as_one_peer(address: Any, peer: str):
    with socket.socket(socket.AF_INET) as sock:
        assert _connections._peer(sock, address) == peer


# Open files.


@pytest.mark.threat(153)
async def test_accept_pauses_when_file_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Short(socket.socket):
        failures = 3
        calls = 0

        def accept(self) -> Any:
            self.calls += 1
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(_connections, "_RETRY_S", 0.01)
    limiter = Limiter(10)
    idle = limiter.accept()
    arrived = asyncio.Event()

    async def serve(sock: socket.socket, _: Connection) -> None:
        sock.close()
        arrived.set()

    with Short() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listening, limiter, serve)
        acceptor.start()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        async with asyncio.timeout(40):
            await arrived.wait()
        acceptor.close()
        assert listening.calls == 5, "one call per attempt, and a last one that would block"
    assert len([r for r in caplog.records if "open files" in r.getMessage()]) == 3
    assert limiter.closed == [idle]


@pytest.mark.threat(153)
def test_connections_leave_files_for_runs(caplog: pytest.LogCaptureFixture):
    assert connection_limit(512, files=1024, runs=16) == 480
    assert connection_limit(512, files=65536, runs=256) == 512
    assert len(caplog.records) == 0
    assert connection_limit(512, files=256, runs=256) == 96
    assert "is too low" in caplog.text


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.threat(153)
@pytest.mark.usefixtures("file_limit")
def test_the_soft_limit_of_open_files_is_raised():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


# Handshakes.


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        far.setblocking(False)
        yield near, far


HELLO = b"\x16\x03\x01\x00\x20" + bytes(32)


@pytest.mark.threat(153)
@pytest.mark.parametrize(
    "sent, fine",
    [
        (HELLO, 1),
        (HELLO + b"more", 1),
        (b"\x16\x03\x01\x40\x00" + bytes(0x4000), 1),
        (b"GET / HTTP/1.1\r\n", 0),
        (b"\x16\x03\x01\x00\x00", 0),
        (b"\x16\x03\x01\xff\xff", 0),
        (b"\x15\x03\x01\x00\x02\x01\x00", 0),
    ],
)
async def test_a_handshake_starts_after_a_whole_record(sent: bytes, fine: int):
    with pair() as (near, far):
        near.sendall(sent)
        async with asyncio.timeout(40):
            assert await sends_client_hello(far) is bool(fine)
        assert far.recv(5) == sent[:5], "the record is not consumed"
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.threat(153)
async def test_a_partial_record_is_not_a_client_hello():
    with pair() as (near, far):
        task = asyncio.ensure_future(sends_client_hello(far))
        for at in range(0, len(HELLO) - 1, 6):
            near.sendall(HELLO[at : min(at + 6, len(HELLO) - 1)])
            await asyncio.sleep(0)
        done, _ = await asyncio.wait({task}, timeout=0.2)
        assert not done
        near.sendall(HELLO[-1:])
        async with asyncio.timeout(40):
            assert await task
    with pair() as (near, far):
        near.sendall(HELLO[:10])
        near.close()
        async with asyncio.timeout(40):
            assert not await sends_client_hello(far)


@pytest.mark.threat(153)
async def test_peers_take_turns_and_stalled_handshakes_make_room():
    limiter = Limiter(500)
    queue = HandshakeQueue(limiter)
    started: list[Connection] = []

    async def handshake(connection: Connection) -> None:
        await queue.enter(connection)
        started.append(connection)

    hostile = [limiter.accept("a") for _ in range(200)]
    tasks = [asyncio.ensure_future(handshake(connection)) for connection in hostile]
    other = limiter.accept("b")
    tasks.append(asyncio.ensure_future(handshake(other)))
    async with asyncio.timeout(40):
        await asyncio.gather(*tasks)
    assert started.index(other) <= 4, "not after 200 connections of another peer"
    assert started[0] is hostile[-1], "the latest connection starts first"
    assert len(queue._active) == 64
    assert other in queue._active
    assert limiter.closed == started[:1] + [c for c in started[1:] if c is not other][: 200 - 64]
    for connection in hostile:
        queue.leave(connection)
    queue.leave(other)
    assert not queue._active
    assert not queue._waiting
