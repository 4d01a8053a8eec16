"""The network policy applies per cell: new, kept and cached connections, threads, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, REMOTE, SOON_S, session_of
from tests.network.conftest import PUBLIC
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.conftest import OpenSession

OVER_A_SERVER = f"{REMOTE}userns"
A, B = "allowed.test", "other.test"
SETUP = """
import os, socket, threading, time
def go(name, port):
    sock = socket.create_connection((name, port), timeout=10)
    sock.sendall(b'x')
    assert sock.recv(9) == b'ok'
    return sock
def attempt(name, port):
    try:
        go(name, port).close()
    except OSError as exc:
        return type(exc).__name__
    return 'through'
"""


class Server:
    """Answers each read with ``ok`` and records when bytes arrived."""

    def __init__(self) -> None:
        self.port = 0
        self.received: list[tuple[float, int]] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.received.append((time.monotonic(), len(data)))
                writer.write(b"ok")
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    found = Server()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


@pytest.fixture
async def a() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def b() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture(scope="module")
def named() -> Iterator[ServerProcess]:
    """A server that resolves the names of these tests to loopback, as ``resolver`` does here."""
    program = (str(Path(__file__).with_name("named_server.py")), f"{A},{B}")
    with ServerProcess("--backend", "userns", program=program) as server:
        yield server


@pytest.fixture(params=[*ISOLATED, OVER_A_SERVER])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """A session on this machine, or over a server: the policy of a cell is that of its session."""
    if request.param == OVER_A_SERVER:
        server = request.getfixturevalue("named")
        session = sb.remote.session(endpoint=server.endpoint, token=server.token)
    else:
        request.getfixturevalue("resolver")
        session = session_of(request.param)
    async with session:
        proc = await session.run("true", network_mode="allowlist", network_allowlist=["a.test"])
        if proc.isolation.egress != "kernel":
            pytest.skip("this kernel lacks nf_tables: as root, modprobe nf_tables nft_chain_nat")
        yield session


@pytest.fixture
async def ctx(net: sb.Session, a: Server, b: Server) -> AsyncIterator[sb.Context]:
    async with net.context() as context:
        names = f"A, B = ({A!r}, {a.port}), ({B!r}, {b.port})"
        assert (await context.run(SETUP + names)).ok
        yield context


async def cell(ctx: sb.Context, code: str, *names: str) -> sb.CellResult:
    if not names:
        return await ctx.run(code, timeout_s=30)
    allow = [*names, "127.0.0.1"]
    return await ctx.run(code, network_mode="allowlist", network_allowlist=allow, timeout_s=30)


async def cell_until(
    ctx: sb.Context, net: sb.Session, code: str, name: str, arrived: Callable[[], bool]
) -> sb.CellResult:
    """Run a cell that ends after what it sends has arrived at a server of this test."""
    mark = f"arrived-{time.monotonic_ns()}"
    wait = f"\nwhile not os.path.exists({mark!r}): time.sleep(0.005)"
    running = asyncio.ensure_future(cell(ctx, code + wait, name))
    async with asyncio.timeout(SOON_S):
        while not (arrived() or running.done()):
            await asyncio.sleep(0.005)
    await net.put_bytes(mark, b"")
    return await running


@pytest.mark.spec("K2")
async def test_each_cell_has_its_own_list(ctx):
    both = "attempt(*A), attempt(*B)"
    assert (await cell(ctx, both)).text == "('gaierror', 'gaierror')"
    result = await cell(ctx, both, A)
    assert result.text == "('through', 'gaierror')"
    assert {(d.host, d.allowed) for d in result.network} == {(A, True), (B, False)}
    result = await cell(ctx, both, B)
    assert result.text == "('gaierror', 'through')"
    assert {(d.host, d.allowed) for d in result.network} == {(A, False), (B, True)}
    assert (await cell(ctx, both)).text == "('gaierror', 'gaierror')"


@pytest.mark.spec("K2")
async def test_an_open_cell_reaches_every_name(open_isolated, resolver, dialled, a):
    resolver.table[A] = [PUBLIC]
    dialled.to_loopback.add(PUBLIC)
    code = f"attempt({A!r}, {a.port})"
    async with open_isolated() as session, session.context() as ctx:
        await ctx.run(SETUP)
        assert (await ctx.run(code, network_mode="open", timeout_s=30)).text == "'through'"
        assert (await ctx.run(code, timeout_s=30)).text == "'gaierror'"


@pytest.mark.spec("K2")
async def test_a_kept_connection_is_judged_by_each_cell(ctx, a):
    assert (await cell(ctx, "s = go(*A)", A)).ok
    result = await cell(ctx, "s.sendall(b'again'); s.recv(9)", A, B)
    assert result.text == "b'ok'"
    (decision,) = result.network
    assert (decision.host, decision.bytes_up, decision.bytes_down) == (A, 5, 2)
    before = len(a.received)
    result = await cell(ctx, "s.sendall(b'secret'); s.recv(9)", B)
    assert result.error.name in {"ConnectionResetError", "BrokenPipeError"}
    assert len(a.received) == before
    assert next(d.error for d in result.network if d.host == A).startswith("reset by a change")
    assert a.connections == 1


@pytest.mark.spec("K2")
async def test_a_cached_address_means_its_name(ctx):
    result = await cell(ctx, "cached = socket.gethostbyname(A[0]); attempt(cached, A[1])", A)
    assert result.text == "'through'"
    assert (await cell(ctx, "attempt(cached, A[1])", B)).text == "'ConnectionResetError'"
    assert (await cell(ctx, "attempt(cached, A[1])")).text == "'ConnectionResetError'"
    assert (await cell(ctx, "attempt(cached, A[1])", A)).text == "'through'"


@pytest.mark.spec("K2")
async def test_a_thread_left_behind_has_no_network_between_cells(ctx, net, b):
    await cell(
        ctx,
        "def keep():\n  while True: attempt(*B); time.sleep(0.002)\n"
        "threading.Thread(target=keep, daemon=True).start()",
    )
    await asyncio.sleep(0.2)
    assert b.connections == 0
    result = await cell_until(ctx, net, "1", B, lambda: b.connections > 1)
    await asyncio.sleep(0.15)  # a connection that was allowed before the end may still arrive
    during = b.connections
    assert during > 1, "control: the thread works while a cell allows its host"
    assert any(d.allowed and d.host == B for d in result.network)
    await asyncio.sleep(0.15)
    assert b.connections == during
    await cell(ctx, "time.sleep(0.1)", A)
    assert b.connections == during


@pytest.mark.spec("K2")
async def test_an_open_connection_carries_nothing_between_cells(ctx, net, a):
    await cell_until(
        ctx,
        net,
        "s = go(*A)\n"
        "def talk():\n"
        "  try:\n"
        "    while True: s.send(b'y' * 1000); time.sleep(0.001)\n"
        "  except OSError as exc: failed = exc\n"
        "threading.Thread(target=talk, daemon=True).start()",
        A,
        lambda: len(a.received) > 1,
    )
    await asyncio.sleep(0.1)  # what the kernel had accepted before has arrived
    before = len(a.received)
    assert before > 1
    await asyncio.sleep(0.3)
    assert len(a.received) == before
    result = await cell_until(ctx, net, "1", A, lambda: len(a.received) > before)
    assert len(a.received) > before, "control: it continues in a cell that allows it"
    assert sum(d.bytes_up for d in result.network) > 0
    await cell(ctx, "1")
    await asyncio.sleep(0.05)
    after = len(a.received)
    await asyncio.sleep(0.2)
    assert len(a.received) == after


@pytest.mark.spec("K2")
async def test_a_plain_proxy_request_does_not_outlive_its_cell(ctx, net, a):
    await cell_until(
        ctx,
        net,
        "p = socket.create_connection(('127.0.0.1', 3128), timeout=10)\n"
        f"p.sendall(b'POST http://{A}:{a.port}/ HTTP/1.1\\r\\nHost: {A}:{a.port}\\r\\n"
        "Content-Length: 100\\r\\n\\r\\nbody')",
        A,
        lambda: bool(a.received),
    )
    assert a.received, "control: the head arrived"
    before = len(a.received)
    result = await cell(ctx, "p.sendall(b'more'); time.sleep(0.1); p.recv(9)", A)
    assert result.error is not None or result.text == "b''"
    assert len(a.received) == before


@pytest.mark.spec("K2")
async def test_a_refusal_is_recorded_on_every_cell(ctx):
    for _ in range(3):
        result = await cell(ctx, "attempt(*B)", A)
        assert [(d.host, d.allowed) for d in result.network] == [(B, False)]


@pytest.mark.spec("K2")
async def test_no_client_caches_an_address_from_an_earlier_cell(ctx):
    code = (
        "q = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); q.settimeout(10)\n"
        "q.sendto(bytes.fromhex('000101000001000000000000') + b'\\x07allowed\\x04test\\0'"
        " + bytes.fromhex('00010001'), ('127.0.0.53', 53))\n"
        "r = q.recv(512); int.from_bytes(r[-10:-6], 'big')"
    )
    assert (await cell(ctx, code, A)).text == "0"


@pytest.mark.spec("K2")
async def test_a_cell_cannot_exceed_its_session(open_isolated: OpenSession):
    async with open_isolated(network_mode="blocked") as session, session.context() as ctx:
        with pytest.raises(sb.PolicyError):
            await ctx.run("1", network_mode="open")
        result = await ctx.run("import socket; [name for _, name in socket.if_nameindex()]")
        assert result.text == "['lo']"
        probe = "socket.create_connection(('127.0.0.1', 3128), timeout=5)"
        assert (await ctx.run(probe)).error.name == "ConnectionRefusedError"


@pytest.mark.spec("K2")
async def test_two_contexts_have_separate_networks(net: sb.Session, a: Server):
    async with net.context() as one, net.context() as two:
        for ctx in (one, two):
            await ctx.run(SETUP + f"A = ({A!r}, {a.port})")
        wait = "import os\nopen('ready', 'w')\nwhile not os.path.exists('go'): time.sleep(0.005)\n"
        allowed = asyncio.create_task(cell(one, wait + "attempt(*A)", A))
        while not await _exists(net, "ready"):
            await asyncio.sleep(0.005)
        assert (await cell(two, "attempt(*A)")).text == "'gaierror'"
        await net.put_bytes("go", b"")
        assert (await allowed).text == "'through'"


async def _exists(session: sb.Session, name: str) -> bool:
    return any(entry.path == name for entry in await session.list_dir("."))
