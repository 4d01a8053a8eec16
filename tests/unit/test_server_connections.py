"""Connections of a server: which one ends when there are too many, and when a handshake begins."""

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
    ConnectionTable,
    connection_limit,
    raise_file_limit,
)
from union.sandbox.server._handshakes import HandshakeQueue, sends_client_hello
from union.sandbox.server._metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNER, GUEST = Grant(), Grant("s", "guest")


class Table(ConnectionTable):
    """One that remembers what it has closed."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, header_timeout_s=60, metrics=Metrics())
        self.closed: list[Connection] = []

    def come(self, peer: str = "a") -> Connection:
        connection = self.open(peer)
        connection.close = lambda: self.closed.append(connection)
        return connection

    def come_with(self, grant: Grant) -> Connection:
        connection = self.come()
        self.asked(connection)
        self.prove(connection, grant)
        return connection


@pytest.mark.threat(152)
async def test_strangers_make_room_for_everybody_who_comes():
    table = Table(100)
    strangers = [table.come() for _ in range(100)]
    owner = table.come()
    assert table.closed == strangers[:1]
    table.prove(owner, OWNER)
    for _ in range(1000):
        table.come()
    assert owner.state == "busy", "a connection with a key is not closed"
    assert len(table) == 100


@pytest.mark.threat(152)
async def test_the_peer_with_the_most_connections_loses_one():
    table = Table(100)
    quiet = table.come("b")
    for _ in range(5000):
        table.come("a")
    assert quiet.state == "new"
    assert {connection.peer for connection in table.closed} == {"a"}


@pytest.mark.threat(152)
async def test_idle_connections_make_room_and_busy_ones_do_not():
    table = Table(50)
    kept = [table.come_with(OWNER) for _ in range(50)]
    late = table.come()
    with pytest.raises(SandboxConnectionError) as caught:
        table.prove(late, OWNER)
    assert caught.value.code == "busy"
    assert table.closed == [], "in the reserve a caller is answered"
    table.rest(kept[3])
    table.rest(kept[1])
    table.prove(late, OWNER)
    assert table.closed == [kept[3]], "the one that is idle for the longest time"
    for _ in range(1000):
        table.come()
    assert [connection.state for connection in kept].count("busy") == 48
    assert len(table) <= 50 + 16


@pytest.mark.threat(152)
async def test_a_key_with_fewer_rights_cannot_take_every_connection():
    table = Table(100)
    guests = 0
    with contextlib.suppress(SandboxConnectionError):
        for _ in range(101):
            table.come_with(GUEST)
            guests += 1
    assert guests == 25
    others = 0
    with contextlib.suppress(SandboxConnectionError):
        for number in range(101):
            table.come_with(Grant("s", f"capability:{number}"))
            others += 1
    assert guests + others == 50
    for _ in range(50):
        table.come_with(OWNER)


async def test_counts_return_to_zero():
    table = Table(20)
    made = [table.come_with(grant) for grant in (OWNER, GUEST, GUEST) for _ in range(1)]
    made += [table.come("b"), table.come("c")]
    table.rest(made[1])
    table.asked(made[1])
    table.prove(made[1], OWNER)
    for connection in made:
        table.lost(connection)
        table.lost(connection)
    assert len(table) == 0
    assert table._limited == 0
    assert not table._by_key
    assert not table._new
    with pytest.raises(ConnectionResetError):
        table.prove(made[0], OWNER)


async def test_a_connection_without_a_key_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_connections, "_ANSWER_S", 0.01)
    table = Table(10)
    asked, proven = table.come(), table.come()
    table.asked(asked)
    table.asked(proven)
    table.prove(proven, OWNER)
    async with asyncio.timeout(10):
        while not table.closed:
            await asyncio.sleep(0.01)
    assert table.closed == [asked]


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
def test_what_counts_as_one_peer(address: Any, peer: str):
    with socket.socket(socket.AF_INET) as sock:
        assert _connections._peer(sock, address) == peer


# Open files.


@pytest.mark.threat(153)
async def test_a_shortage_of_files_is_waited_for_without_a_flood(
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
    table = Table(10)
    idle = table.come()
    arrived = asyncio.Event()

    async def serve(sock: socket.socket, _: Connection) -> None:
        sock.close()
        arrived.set()

    with Short() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listening, table, serve)
        acceptor.start()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        async with asyncio.timeout(10):
            await arrived.wait()
        acceptor.close()
        assert listening.calls == 5, "one call for each attempt, and one that finds nothing more"
    assert len([r for r in caplog.records if "open files" in r.getMessage()]) == 3
    assert table.closed == [idle]


@pytest.mark.threat(153)
def test_connections_leave_files_for_runs(caplog: pytest.LogCaptureFixture):
    assert connection_limit(512, files=1024, runs=16) == 480
    assert connection_limit(512, files=65536, runs=256) == 512
    assert len(caplog.records) == 0
    assert connection_limit(512, files=256, runs=256) == 96
    assert "is low" in caplog.text


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
async def test_a_handshake_begins_with_a_whole_record(sent: bytes, fine: int):
    with pair() as (near, far):
        near.sendall(sent)
        async with asyncio.timeout(10):
            assert await sends_client_hello(far) is bool(fine)
        assert far.recv(5) == sent[:5], "nothing was taken"
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.threat(153)
async def test_a_part_of_a_record_is_waited_for():
    with pair() as (near, far):
        task = asyncio.ensure_future(sends_client_hello(far))
        for at in range(0, len(HELLO) - 1, 6):
            near.sendall(HELLO[at : min(at + 6, len(HELLO) - 1)])
            await asyncio.sleep(0)
        done, _ = await asyncio.wait({task}, timeout=0.2)
        assert not done
        near.sendall(HELLO[-1:])
        async with asyncio.timeout(10):
            assert await task
    with pair() as (near, far):
        near.sendall(HELLO[:10])
        near.close()
        async with asyncio.timeout(10):
            assert not await sends_client_hello(far)


@pytest.mark.threat(153)
async def test_peers_take_turns_and_stalled_handshakes_make_room():
    table = Table(500)
    queue = HandshakeQueue(table)
    begun: list[Connection] = []

    async def handshake(connection: Connection) -> None:
        await queue.enter(connection)
        begun.append(connection)

    hostile = [table.come("a") for _ in range(200)]
    tasks = [asyncio.ensure_future(handshake(connection)) for connection in hostile]
    other = table.come("b")
    tasks.append(asyncio.ensure_future(handshake(other)))
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
    assert begun.index(other) <= 4, "not behind 200 of another peer"
    assert begun[0] is hostile[-1], "the latest first"
    assert len(queue._active) == 64
    assert other in queue._active
    assert table.closed == begun[:1] + [c for c in begun[1:] if c is not other][: 200 - 64]
    for connection in hostile:
        queue.leave(connection)
    queue.leave(other)
    assert not queue._active
    assert not queue._waiting
