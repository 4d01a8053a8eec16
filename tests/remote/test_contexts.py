"""Contexts over a server: cells survive cuts, keys and ceilings hold, no peer is trusted."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, eventually
from tests.remote.conftest import Proxy, is_idle, remote, sandboxes_of
from tests.remote.hostile import EXITED, FACTS, HostileServer, event
from tests.remote.test_hostile_clients import connected, session_with_capability
from tests.remote.test_own_server import DIAL, MODES
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._contexts import frames
from union.sandbox._contexts.specs import CellSpec, ContextSpec
from union.sandbox._contexts.values import CellEnd, MimeBundle
from union.sandbox._contexts.wire import (
    ContextChange,
    encode_cell,
    encode_change,
    encode_context,
    encode_display,
    encode_end,
)
from union.sandbox._core.spec import SessionSpec
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import MESSAGES, Kind, Offsets
from union.sandbox._wire.values import encode_start_body
from union.sandbox.errors import SandboxConnectionError
from union.sandbox.remote import _context, _transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiohttp import ClientWebSocketResponse, web

SESSION = SessionSpec(backend="userns")

# Output, displays of all sizes and a count of how often the cell ran.
TALK = """
import os, random, time
open('ran', 'a').write('x')
chance = random.Random(SEED)
for n in range(40):
    os.write(1, bytes([48 + n]) * chance.randrange(1, 40_000))
    os.write(2, b"%d\\n" % n)
    display(f'{n}' * chance.randrange(1, 40_000))
    time.sleep(0.004)
SEED
"""


def expected(seed: int) -> tuple[str, list[str]]:
    chance = random.Random(seed)
    out, shown = "", []
    for n in range(40):
        out += chr(48 + n) * chance.randrange(1, 40_000)
        shown.append(repr(f"{n}" * chance.randrange(1, 40_000)))
    return out, [*shown, str(seed)]


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """Provide a server whose grace period no load of the machine exceeds."""
    with ServerProcess("--backend", "userns", "--grace", "60") as server:
        yield server


@pytest.fixture
async def cuts(patient: ServerProcess) -> AsyncIterator[Proxy]:
    async with Proxy(patient) as found:
        yield found


@pytest.mark.spec("K7")
async def test_a_cell_survives_any_number_of_cuts(patient: ServerProcess, cuts: Proxy):
    proxy, chance = cuts, random.Random(3)
    async with (
        remote(patient, endpoint=proxy.endpoint) as session,
        session.context() as ctx,
    ):
        for seed in (1, 2, 3):
            cell = asyncio.create_task(ctx.run(TALK.replace("SEED", str(seed))))
            for _ in range(6):
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                proxy.cut()
            result = await cell
            out, shown = expected(seed)
            assert result.ok
            assert result.stdout == out
            assert result.stderr == "".join(f"{n}\n" for n in range(40))
            assert [bundle.text for bundle in result.results] == shown
        assert await session.get_bytes("ran") == b"xxx", "each cell ran once"
        assert ctx.generation == 0
    assert proxy.cuts >= 3


@pytest.mark.spec("K7")
async def test_displays_stay_in_order_with_output_over_cuts(patient: ServerProcess, cuts: Proxy):
    proxy = cuts
    code = "import os\nfor n in range(300):\n    os.write(1, b'%d,' % n)\n    display(n)"
    async with (
        remote(patient, endpoint=proxy.endpoint) as session,
        session.context() as ctx,
    ):
        seen = ""
        async for shown in ctx.stream(code):
            if isinstance(shown, sb.CellOutput):
                seen += shown.text
            elif isinstance(shown, sb.MimeBundle):
                assert f",{shown.text}," in f",{seen}", "a display follows what was printed before"
                if int(shown.text) % 100 == 50:
                    proxy.cut()
            else:
                assert shown.ok
        assert seen == "".join(f"{n}," for n in range(300))
    assert proxy.cuts >= 1


@pytest.mark.spec("K7", "K3")
async def test_interrupt_restart_and_close_survive_cuts(patient: ServerProcess, cuts: Proxy):
    proxy = cuts
    async with remote(patient, endpoint=proxy.endpoint) as session:
        ctx = await session.context().open()
        await ctx.run("x = 1")
        for _ in range(3):
            stream = ctx.stream("print('go')\nwhile True: pass")
            assert (await anext(stream)).text == "go\n"
            proxy.cut()
            ctx.interrupt()  # while there is no connection
            result = await anext(stream)
            assert (result.ended, result.state) == ("interrupt", "kept")
            assert (await ctx.run("x")).text == "1"
        proxy.cut()
        await ctx.restart()
        assert (await ctx.run("'x' in globals()")).text == "False"
        assert ctx.generation == 1
        proxy.cut()
        await ctx.close()
        assert not ctx.alive


@pytest.mark.spec("K7")
async def test_a_lost_server_is_an_error_and_never_a_result(monkeypatch):
    """Neither an end nor a state is made up when the server is gone."""
    with ServerProcess("--backend", "userns", "--grace", "0.5") as server:
        async with remote(server) as session:
            ctx = await session.context().open()
            await ctx.run("x = 1")
            stream = ctx.stream("print(1)\nwhile True: pass")
            await anext(stream)
            server.process.kill()
            with pytest.raises(SandboxConnectionError):
                await anext(stream)
            assert not ctx.alive
            with pytest.raises(sb.ContextLostError):
                await ctx.run("x")
            with pytest.raises(SandboxConnectionError):
                await ctx.restart()
            await ctx.close()


@pytest.mark.spec("K7")
async def test_a_client_that_vanishes_leaves_no_context(quick: ServerProcess, proxy: Proxy):
    session = remote(quick, endpoint=proxy.endpoint, backend="userns")
    await session.open()
    ctx = await session.context().open()
    cell = asyncio.create_task(ctx.run("import time\nwhile True: time.sleep(0.01)"))
    while not ctx.busy or not sandboxes_of(quick):
        await asyncio.sleep(0.01)
    proxy.accepts = False
    proxy.cut()
    with pytest.raises(SandboxConnectionError):
        await cell
    await session.close()
    assert await asyncio.to_thread(eventually, lambda: is_idle(quick))


@pytest.mark.spec("K7")
async def test_a_context_of_one_connection_ends_after_the_grace_period(
    quick: ServerProcess, proxy: Proxy
):
    """The session lives on: another client is connected."""
    async with remote(quick, backend="userns", lazy=False) as owner:
        name = owner._transport.name
        _, body = quick.request("POST", f"/v1/sessions/{name}/capability", b"{}")
        token = json.loads(body)["token"]
        async with connected(quick, name, token) as ws:
            await ws.send_bytes(b"".join(wire.encode_start(5, encode_context(CONTEXT))))
            await _until(ws, 5, "started")
            assert sandboxes_of(quick), "positive control"
        assert await asyncio.to_thread(eventually, lambda: not sandboxes_of(quick))
        async with owner.context() as ctx:
            assert (await ctx.run("1 + 1")).text == "2"


# Policy and keys.


@pytest.mark.spec("K2", "K7")
async def test_the_network_of_a_cell_stays_below_the_servers_and_the_sessions():
    arguments = ("--backend", "userns", "--network-mode", "allowlist", "--network-allow", "a.test")
    with ServerProcess(*arguments) as server:
        async with remote(server) as session, session.context() as ctx:
            with pytest.raises(sb.PolicyError):
                await ctx.run("1", network_mode="open")
            with pytest.raises(sb.PolicyError):
                await ctx.run("1", network_mode="allowlist", network_allowlist=["b.test"])
            allowed = {"network_mode": "allowlist", "network_allowlist": ["a.test"]}
            assert (await ctx.run("1", **allowed)).ok
        async with remote(server, network_mode="blocked") as session, session.context() as ctx:
            with pytest.raises(sb.PolicyError):
                await ctx.run("1", **allowed)
            assert (await ctx.run("1")).ok


def dial(port: int) -> str:
    return DIAL.replace("PORT", str(port)).replace("NAMES", "['127.0.0.1', '127.0.0.2']", 1)


@pytest.mark.threat(122)
async def test_no_cell_reaches_its_own_server(quick: ServerProcess):
    """Positive control: the same cell reaches another service of this machine."""
    mode = MODES["allowlist by address"]
    with ServerProcess(bind="0.0.0.0:0") as other:
        async with remote(quick, backend="userns") as session, session.context() as ctx:
            result = await ctx.run(dial(quick.address[1]), **mode)
            assert result.ok
            assert " 200" not in result.stdout
            result = await ctx.run(dial(other.address[1]), **mode)
            assert "proxy 127.0.0.2 200" in result.stdout.splitlines()


CONTEXT = ContextSpec(language="python")


def cell_body(context: int, code: bytes, number: int = 1) -> bytes:
    return encode_cell(CellSpec(code=code), SESSION, context=context, number=number)


async def _until(ws: ClientWebSocketResponse, run: int, name: str) -> dict[str, Any]:
    """Return the event ``name`` of a run, and acknowledge nothing."""
    while True:
        for frame in wire.decode(await ws.receive_bytes(timeout=20)):
            if frame.run == run and frame.kind is Kind.EVENT:
                found = json.loads(wire.decode_numbered(frame.payload)[1])
                if name in found:
                    return found[name]


@pytest.mark.threat(152)
@pytest.mark.spec("K7")
async def test_a_key_cannot_use_the_context_of_another(quick: ServerProcess):
    name, token = session_with_capability(quick)
    async with connected(quick, name, quick.token) as owner:
        await owner.send_bytes(b"".join(wire.encode_start(5, encode_context(CONTEXT))))
        await _until(owner, 5, "started")
        stolen = b"".join(wire.encode_start(6, cell_body(5, b"open('guest', 'w')")))
        restart = wire.to_json({"op": "restart", "request": 1})
        async with connected(quick, name, token) as guest:
            await guest.send_bytes(wire.encode_numbered(Kind.CONTROL, 5, 1, restart) + stolen)
            refused = await _until(guest, 6, "refused")
        assert refused["code"] == "context-lost"
        await owner.send_bytes(b"".join(wire.encode_start(7, cell_body(5, b"open('own', 'w')"))))
        await _until(owner, 7, "exited")
    status, body = quick.request("POST", f"/v1/sessions/{name}/files/list", b'{"path": "."}')
    assert status == 200
    paths = {entry["path"] for entry in json.loads(body)["entries"]}
    assert "own" in paths, "positive control"
    assert "guest" not in paths
    quick.request("DELETE", f"/v1/sessions/{name}")


@pytest.mark.spec("K7")
async def test_contexts_use_the_slots_of_commands(monkeypatch):
    monkeypatch.setattr(_transport, "_MAX_BUSY_WAIT_S", 0.3)
    with ServerProcess("--backend", "userns", "--max-runs", "2", "--max-sessions", "1") as server:
        async with remote(server) as session:
            one, two = await session.context().open(), await session.context().open()
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await session.context().open()
            assert caught.value.code == "busy"
            cells = [one.run("1"), two.run("2")]
            assert [result.text for result in await asyncio.gather(*cells)] == ["1", "2"]
            await one.close()
            assert (await session.exec("echo free")).stdout == "free\n"
            await two.close()


BAD_STARTS = {
    "no such context": (cell_body(99, b"1"), "context-lost"),
    "unknown language": (
        encode_start_body({"kind": "context", "language": "cobol", "interrupt_grace_s": 1}, b""),
        "usage",
    ),
    "endless grace": (
        encode_start_body({"kind": "context", "language": "bash", "interrupt_grace_s": 1e9}, b""),
        "usage",
    ),
    "bad timeout": (
        encode_start_body({"kind": "cell", "context": 5, "number": 1, "timeout_s": -1}, b"1"),
        "usage",
    ),
    "bad name": (
        encode_start_body(
            {"kind": "cell", "context": 5, "number": 1, "operation": "get", "name": "a.b"}, b""
        ),
        "usage",
    ),
    "bad operation": (
        encode_start_body({"kind": "cell", "context": 5, "number": 1, "operation": "x"}, b""),
        "usage",
    ),
}


@pytest.mark.threat(160)
async def test_a_bad_cell_is_refused_and_the_connection_continues(quick: ServerProcess):
    name, _ = session_with_capability(quick)
    async with connected(quick, name, quick.token) as ws:
        await ws.send_bytes(b"".join(wire.encode_start(5, encode_context(CONTEXT))))
        await _until(ws, 5, "started")
        for run, (body, code) in enumerate(BAD_STARTS.values(), start=10):
            await ws.send_bytes(b"".join(wire.encode_start(run, body)))
            assert (await _until(ws, run, "refused"))["code"] == code
        busy = b"import time; time.sleep(60)"
        await ws.send_bytes(b"".join(wire.encode_start(30, cell_body(5, busy))))
        await _until(ws, 30, "started")
        await ws.send_bytes(b"".join(wire.encode_start(31, cell_body(5, b"1", 2))))
        assert (await _until(ws, 31, "refused"))["code"] == "context-busy"
    quick.request("DELETE", f"/v1/sessions/{name}")


@pytest.mark.threat(160)
@pytest.mark.parametrize(
    "frame",
    [
        wire.encode_start(10, encode_start_body({"kind": "cell", "context": "5"}, b""))[0],
        wire.encode_start(10, encode_start_body({"kind": "cell", "context": 5}, b""))[0],
        wire.encode_start(10, encode_start_body({"kind": "cell", "context": 5, "number": 0}, b"1"))[
            0
        ],
        wire.encode_start(
            10, encode_start_body({"kind": "cell", "context": 5, "number": 1, "x": 1}, b"1")
        )[0],
        wire.encode_start(
            10,
            encode_start_body(
                {"kind": "cell", "context": 5, "number": 1, "operation": "set"}, b"["
            ),
        )[0],
        wire.encode_start(10, encode_start_body({"kind": "context"}, b"text"))[0],
        wire.encode_start(10, encode_start_body({"kind": "other"}, b"text"))[0],
        wire.encode_numbered(Kind.CONTROL, 5, 1, b'{"op":"restart","request":-1}'),
        wire.encode_numbered(Kind.CONTROL, 5, 1, b'{"op":"signal","signum":9}'),
        b"".join(
            wire.encode_numbered(Kind.CONTROL, 5, n, b'{"op":"restart","request":%d}' % n)
            for n in range(1, 200)
        ),
        wire.encode_offsets(Kind.ACK, 5, Offsets(10**9, 0, 0)),
    ],
)
async def test_a_malformed_frame_closes_the_connection(quick: ServerProcess, frame: bytes):
    name, _ = session_with_capability(quick)
    async with connected(quick, name, quick.token) as ws:
        await ws.send_bytes(b"".join(wire.encode_start(5, encode_context(CONTEXT))))
        await _until(ws, 5, "started")
        await ws.send_bytes(frame)
        while not (message := await ws.receive(timeout=20)).type.name.startswith("CLOS"):
            assert message.type.name == "BINARY"
    quick.request("DELETE", f"/v1/sessions/{name}")


# A hostile server.


class Contexts(HostileServer):
    """Opens contexts, and replies to each cell with these messages and events."""

    facts = {**FACTS, "contexts": True}  # noqa: RUF012 - constant

    def __init__(self, messages: bytes = b"", *, output: bytes = b"", **events: Any) -> None:
        super().__init__()
        self._messages = messages
        self._output = output
        self._events = events
        self._seen = 0

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        self._seen += 1
        await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
        if self._seen == 1:
            if self._events:
                await ws.send_bytes(event(run, 1, self._events))
            return
        for at in range(0, len(self._messages), wire.MAX_CHUNK):
            data = self._messages[at : at + wire.MAX_CHUNK]
            await ws.send_bytes(wire.encode_output_head(run, MESSAGES, at, len(data)) + data)
        out = self._output
        if out:
            await ws.send_bytes(wire.encode_output_head(run, 1, 0, len(out)) + out)
        sizes = ((1, len(out)), (2, 0), (MESSAGES, len(self._messages)))
        await ws.send_bytes(b"".join(wire.encode_end_of_output(run, *size) for size in sizes))
        await ws.send_bytes(event(run, 1, EXITED))

    async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
        if frame.kind is Kind.CONTROL and self._seen == 1:
            sizes = [wire.encode_end_of_output(frame.run, fd, 0) for fd in (1, 2)]
            await ws.send_bytes(b"".join(sizes) + event(frame.run, 1, EXITED))
            return
        await super().frame(ws, frame)


def display(text: str = "x", at: tuple[int, int] = (0, 0)) -> bytes:
    return encode_display(MimeBundle(kind="display", data={"text/plain": text}), at)


DONE = encode_end(CellEnd())


def message(head: object, raw: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    body = struct.pack("=I", len(text)) + text + raw
    return struct.pack(">I", len(body)) + body


async def test_the_control_is_an_honest_server_of_contexts():
    honest = Contexts(display() + display("y", at=(2, 0)) + DONE, output=b"ab")
    async with honest as server, server.open() as session:
        ctx = await session.context().open()
        result = await ctx.run("1")
        assert result.ok
        assert [bundle.text for bundle in result.results] == ["x", "y"]
        assert result.stdout == "ab"


END = {"t": "done", "n": 1, "ended": "", "state": "kept", "reason": ""}
HOSTILE = {
    "too large": struct.pack(">I", 2**31),
    "no head": struct.pack(">I", 2) + b"xx",
    "no JSON": struct.pack(">I", 5) + struct.pack("=I", 1) + b"{",
    "deep JSON": struct.pack(">I", 60_004) + struct.pack("=I", 60_000) + b"[" * 60_000,
    "ready": message({"t": "ready"}),
    "no offsets": message({"t": "display", "n": 1, "parts": []}),
    "bad offsets": message({"t": "display", "n": 1, "parts": [], "at": [-1, 0]}),
    "too many displays": display("") * (frames.MAX_DISPLAYS + 1),
    "displays too large": display("x" * (frames.MAX_RESULT_BYTES // 2 + 1)) * 2,
    "after the end": DONE + display(),
    "two ends": DONE + DONE,
    "unknown end": message({**END, "ended": "maybe"}),
    "unknown state": message({**END, "state": "perhaps"}),
    "died and kept": message({**END, "ended": "died"}),
    "exit code": message({**END, "exit_code": 10**9}),
    "peak": message({**END, "peak": -1}),
    "error": message({**END, "error": 5}),
}


@pytest.mark.threat(160)
@pytest.mark.spec("K7")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_messages_are_a_protocol_error(what):
    async with Contexts(HOSTILE[what]) as server, server.open() as session:
        ctx = await session.context().open()
        with pytest.raises(SandboxConnectionError) as caught:
            await ctx.run("1")
        assert caught.value.code == "protocol"
        assert not ctx.alive


@pytest.mark.threat(160)
@pytest.mark.timeout(60)
async def test_a_cell_without_a_reported_end_has_no_result(monkeypatch):
    monkeypatch.setattr(_context, "_CLOSE_S", 0.3)  # the server does not reply to it

    async with Contexts(display()) as server, server.open() as session:
        ctx = await session.context().open()
        with pytest.raises(SandboxConnectionError, match="without a report of its end"):
            await ctx.run("1")
        await ctx.close()


@pytest.mark.threat(160)
@pytest.mark.timeout(60)
async def test_displays_at_offsets_that_never_come_are_delivered_at_the_end():
    hostile = Contexts(display(at=(10**15, 10**15)) + DONE, output=b"ab")
    async with hostile as server, server.open() as session:
        ctx = await session.context().open()
        assert [bundle.text for bundle in (await ctx.run("1")).results] == ["x"]


async def _use(ctx: sb.Context) -> None:
    await ctx.open()
    await ctx.run("1")
    await ctx.restart()


CHANGES = {
    "no offsets": {"context": {"generation": 1, "alive": True, "reply": 0}},
    "generation": {"context": {"generation": -1, "alive": True, "reply": 0, "at": [0, 0]}},
    "alive": {"context": {"generation": 1, "alive": 1, "reply": 0, "at": [0, 0]}},
    "error": {"context": {"generation": 1, "alive": True, "reply": 0, "at": [0, 0], "error": 1}},
}


@pytest.mark.threat(160)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", CHANGES)
async def test_hostile_changes_of_a_context_are_a_protocol_error(what):
    async with Contexts(DONE, **CHANGES[what]) as server, server.open() as session:
        with pytest.raises(sb.SandboxError):
            await _use(session.context())
    good = encode_change(ContextChange(1, alive=True))
    async with Contexts(DONE, **good) as server, server.open() as session:
        ctx = await session.context().open()
        assert (await ctx.run("1")).ok, "positive control"


@pytest.mark.threat(160)
@pytest.mark.timeout(60)
async def test_a_server_that_never_replies_is_given_up(monkeypatch):
    monkeypatch.setattr(_context, "_REPLY_S", 0.3)
    monkeypatch.setattr(_context, "_CLOSE_S", 0.3)
    monkeypatch.setattr(_transport, "_CLOSE_S", 0.3)

    class Silent(Contexts):
        async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
            if frame.kind is Kind.START:
                await super().frame(ws, frame)

    async with Silent(DONE) as server, server.open() as session:
        ctx = await session.context().open()
        with pytest.raises(SandboxConnectionError) as caught:
            await ctx.restart()
        assert caught.value.code == "no-answer"
        await ctx.close()
        assert not ctx.alive

    class Deaf(Contexts):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None: ...

    monkeypatch.setattr(_context, "_START_S", 0.3)
    async with Deaf() as server, server.open() as session:
        with pytest.raises(SandboxConnectionError) as caught:
            await session.context().open()
        assert caught.value.code == "no-answer"


async def test_a_server_without_contexts_is_named():
    async with HostileServer() as server, server.open() as session:
        with pytest.raises(sb.SandboxUsageError) as caught:
            await session.context().open()
        assert caught.value.code == "context-unsupported"


@pytest.mark.parametrize("backend", ISOLATED[:1])
async def test_other_runs_of_the_session_continue_beside_contexts(quick, backend):
    async with remote(quick, backend=backend) as session, session.context() as ctx:
        busy = asyncio.create_task(ctx.run("import time\nwhile True: time.sleep(0.01)"))
        while not ctx.busy:
            await asyncio.sleep(0)
        assert (await session.exec("echo beside")).stdout == "beside\n"
        ctx.interrupt()
        assert (await busy).ended == "interrupt"
