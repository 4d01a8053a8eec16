"""A client trusts no server: memory, time and errors stay within limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import struct
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.remote.conftest import remote
from tests.remote.hostile import DECISION, EXITED, FACTS, TOKEN, HostileServer, event

from union import sandbox as sb
from union.sandbox._wire import frames as wire
from union.sandbox.errors import SandboxConnectionError
from union.sandbox.remote import _http, _run, _transport

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import ServerProcess

pytestmark = [pytest.mark.threat(160), pytest.mark.timeout(60)]
MIB = 1024 * 1024
END = b"\xff\xff\xff\xff"
DONE = END + b'{"done":true}'


async def test_the_control_is_an_honest_server():
    async with HostileServer() as server, server.open() as session:
        assert (await session.exec("true")).returncode == 0
        assert await session.list_dir(".") == ()
        assert server.tokens
        assert set(server.tokens) == {TOKEN}


def piece(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


class Downloads(HostileServer):
    def __init__(self, *pieces: bytes, **headers: str) -> None:
        super().__init__()
        self._pieces, self._headers = pieces, headers

    async def download(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers)
        await response.prepare(request)
        for data in self._pieces:
            await response.write(data)
        return response


@pytest.mark.parametrize(
    "pieces, why",
    [
        ([piece(bytes(101)), DONE], "more than 100 bytes"),
        ([piece(bytes(60)), piece(bytes(60)), DONE], "more than 100 bytes"),
        ([piece(bytes(MIB))] * 50, "more than 100 bytes"),
        ([struct.pack(">I", 2**31)], "a piece of 2147483648 bytes"),
        ([bytes(4)] * 100, "a piece of 0 bytes"),
        ([piece(b"x"), END, *[bytes(MIB)] * 64], "a reply of more than"),
        ([piece(b"x"), END, b"{}"], "has no outcome"),
        ([piece(b"x"), END, b"no"], "invalid JSON"),
        ([piece(b"x")], "truncated"),
        ([], "truncated"),
    ],
)
async def test_a_download_stays_within_its_limit(pieces, why):
    async with Downloads(piece(b"x" * 100), DONE) as server, server.open() as session:
        assert await session.get_bytes("f", max_bytes=100) == b"x" * 100, "the control"
    async with Downloads(*pieces) as server, server.open() as session:
        with pytest.raises(SandboxConnectionError, match=why):
            await session.get_bytes("f", max_bytes=100)


async def test_a_tree_stays_within_its_limit(tmp_path: Path):
    class Tree(Downloads):
        async def files(self, _: web.Request) -> web.StreamResponse:
            payload = {"path": "f", "kind": "file", "size": 10, "mode": 420, "mtime": 0}
            return web.json_response(payload)

    async with Tree(*[piece(bytes(MIB))] * 20, DONE) as server, server.open() as session:
        with pytest.raises(sb.SandboxError):
            await session.download("f", tmp_path / "out", max_bytes=100)
    assert [path for path in tmp_path.iterdir() if path.stat().st_size] == []


async def test_a_reply_is_not_decompressed():
    """With decompression, a bomb of a megabyte becomes a gigabyte."""
    bomb = gzip.compress(bytes(64 * MIB))

    class Bomb(HostileServer):
        async def files(self, _: web.Request) -> web.StreamResponse:
            headers = {"Content-Encoding": "gzip"}
            return web.Response(body=bomb, headers=headers, content_type="application/json")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with Bomb() as server, server.open() as session:
        with pytest.raises(SandboxConnectionError) as caught:
            await session.list_dir(".")
    assert caught.value.code == "protocol"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed_and_no_token_is_sent(status: int):
    async with HostileServer() as elsewhere:

        class Redirects(HostileServer):
            async def files(self, _: web.Request) -> web.StreamResponse:
                return web.Response(status=status, headers={"Location": elsewhere.endpoint})

            upload = download = files

        async with Redirects() as server, server.open() as session:
            for call in (
                session.list_dir("."),
                session.put_bytes("a", b"abc"),
                session.get_bytes("a"),
            ):
                with pytest.raises(SandboxConnectionError, match="redirects are not followed"):
                    await call

        class Moves(HostileServer):
            async def _connect(self, _: web.Request) -> web.StreamResponse:
                location = f"{elsewhere.endpoint}/v1/sessions/{'0' * 32}/connect"
                return web.Response(status=status, headers={"Location": location})

        async with Moves() as server:
            with pytest.raises(SandboxConnectionError, match="redirects are not followed"):
                async with server.open(lazy=False):
                    pytest.fail("it was opened")
        assert (elsewhere.requests, elsewhere.tokens) == ({}, [])


async def test_the_health_check_sends_no_token():
    class Refuses(HostileServer):
        async def health(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"status": "ok", "protocol": 999})

    async with Refuses() as server:
        with pytest.raises(SandboxConnectionError, match="version 999"):
            async with server.open(lazy=False):
                pytest.fail("it was opened")
        assert server.requests["GET health"] == 1
        assert server.tokens == []


# Values.

FILE = {"path": "x", "kind": "file", "size": 1, "mode": 420, "mtime": 0}
LISTINGS: list[Any] = [
    {}, {"entries": 3}, {"entries": None}, {"entries": {}}, {"entries": [3]}, {"entries": [None]},
    {"entries": [{"path": "x"}]}, [], "text", 3, None,
    *[{"entries": [{**FILE, **change}]} for change in (
        {"path": "../../x"}, {"path": "/etc/passwd"}, {"path": "a\0b"}, {"path": 3}, {"path": ""},
        {"size": -1}, {"size": True}, {"size": 10**30}, {"mode": -1}, {"mode": 10**9},
        {"mtime": "now"}, {"mtime": 10**400}, {"kind": "door"}, {"kind": None},
    )],
]  # fmt: skip


@pytest.mark.parametrize("payload", LISTINGS, ids=lambda payload: json.dumps(payload)[:60])
async def test_a_reply_with_wrong_values_is_a_sandbox_error(payload):
    class Lists(HostileServer):
        def __init__(self) -> None:
            super().__init__()
            self.answer: Any = {"entries": [FILE]}

        async def files(self, _: web.Request) -> web.StreamResponse:
            return web.Response(body=json.dumps(self.answer), content_type="application/json")

    async with Lists() as server, server.open() as session:
        assert [info.path for info in await session.list_dir(".")] == ["x"], "the control"
        server.answer = payload
        with pytest.raises(SandboxConnectionError) as caught:
            await session.list_dir(".")
        assert caught.value.code == "protocol"


ERRORS: list[Any] = [
    {"type": "SandboxFileError"},
    {"type": "SandboxPathError", "message": 3},
    {"type": "BackendUnavailableError", "missing": [1, None], "message": {}},
    {"type": ["SandboxFileError"], "message": "m"},
    {"type": "SandboxFileError", "message": "m", "number": 10**30, "path": 3},
    {"type": "SystemExit", "message": "m"},
    {"type": "SandboxUsageError", "message": "m", "code": "x\x1b[31m", "hint": ["h"]},
    {"type": "SandboxUsageError", "message": "\x1b]0;title\x07" * 10_000},
    {},
]


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
async def test_an_error_with_wrong_values_is_a_sandbox_error(error):
    class Fails(HostileServer):
        async def files(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"error": error}, status=400)

    async with Fails() as server, server.open() as session:
        with pytest.raises(sb.SandboxError) as caught:
            await session.list_dir(".")
    shown = str(caught.value)
    assert "\x1b" not in shown + caught.value.code
    assert len(shown) < 20_000


@pytest.mark.parametrize(
    "change",
    [
        {"work_dir": "relative"}, {"work_dir": 3}, {"work_dir": "/a\0b"}, {"grace_s": -1},
        {"grace_s": 1e300}, {"grace_s": "1"}, {"grace_s": None}, {"isolation": {}},
        {"isolation": {"backend": "none\x1b[31m"}}, {"isolation": {"backend": "x" * 5000}},
        {"isolation": {"backend": "userns", "limits": {"a": 3}}}, {"isolation": 3},
        {"session": "another"}, {"session": 3}, {"fs_allowlist": 3},
        {"fs_allowlist": {"read_only": ["relative"], "read_write": []}},
        {"fs_allowlist": {"read_only": "/", "read_write": []}},
    ],
    ids=str,
)  # fmt: skip
async def test_a_description_with_wrong_values_opens_no_session(change):
    async with HostileServer() as server:
        server.facts = {**FACTS, **change}
        with pytest.raises(SandboxConnectionError) as caught:
            async with server.open(lazy=False):
                pytest.fail("it was opened")
        assert caught.value.code == "protocol"


# Time.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits to what a test can wait for."""
    monkeypatch.setattr(_http, "CALL_S", 0.5)
    monkeypatch.setattr(
        _http.HttpClient.call, "__kwdefaults__", {"within_s": 0.5, "max_bytes": MIB}
    )
    monkeypatch.setattr(_http, "IDLE_S", 0.5)
    monkeypatch.setattr(_http, "_HANDSHAKE_S", 0.5)
    monkeypatch.setattr(_run, "DEADLINE_GRACE_S", 0.5)
    monkeypatch.setattr(_run, "REMAINING_OUTPUT_S", 0.5)
    for name in ("_CLOSE_S", "_DELETE_S", "_SESSION_GRACE_S"):
        monkeypatch.setattr(_transport, name, 0.5)


class Silent(HostileServer):
    async def files(self, _: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    upload = download = files

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))

    async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
        if frame.kind is not wire.Kind.CLOSE:
            await super().frame(ws, frame)


@pytest.mark.usefixtures("impatient")
async def test_every_call_ends_even_if_the_server_never_replies():
    async with Silent() as server, server.open() as session:
        for call in (
            session.list_dir("."),
            session.stat("x"),
            session.get_bytes("x"),
            session.put_bytes("x", bytes(16 * MIB)),
        ):
            with pytest.raises(SandboxConnectionError) as caught:
                await call
            assert caught.value.code == "no-answer"
        with pytest.raises(sb.SandboxExecutionError, match="did not report the end") as ended:
            await session.exec("true", timeout_s=0.2)
        assert (ended.value.code, ended.value.returncode) == ("no-answer", -1)


@pytest.mark.usefixtures("impatient")
async def test_a_start_without_a_reply_ends_as_well():
    class Mute(Silent):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            pass

    async with Mute() as server, server.open() as session:
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await session.exec("true", timeout_s=0.2)
        assert caught.value.code == "no-answer"


@pytest.mark.usefixtures("impatient")
async def test_repeated_starts_do_not_postpone_the_deadline():
    class Restarts(Silent):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            for number in range(1000):
                await ws.send_bytes(event(run, number, {"started": {"pid": 2}}))
                await asyncio.sleep(0.05)

    async with Restarts() as server, server.open() as session:
        with pytest.raises(sb.SandboxExecutionError, match="started after the start") as caught:
            await session.exec("true", timeout_s=0.2)
        assert caught.value.code == "protocol"


@pytest.mark.usefixtures("impatient")
async def test_missing_output_after_the_end_is_not_awaited_forever():
    class Ends(Silent):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
            await ws.send_bytes(event(run, 1, EXITED))

    async with Ends() as server, server.open() as session:
        with pytest.raises(sb.SandboxExecutionError, match="no more of its output"):
            await session.exec("true")


@pytest.mark.usefixtures("impatient")
async def test_the_session_timeout_ends_a_call_without_its_own(monkeypatch):
    monkeypatch.setattr(_http.HttpClient.call, "__kwdefaults__", {"within_s": 60, "max_bytes": MIB})
    async with Silent() as server, server.open(timeout_s=3) as session:
        with pytest.raises(SandboxConnectionError) as caught:
            await session.list_dir(".")
        assert caught.value.code == "no-answer"


# Streams.


class Floods(HostileServer):
    """A command whose server sends more than was requested."""

    size = 250 * 1024
    asked = 4000
    sent = 0

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
        data, at = bytes(self.size), 0
        for _ in range(self.asked):
            await ws.send_bytes(wire.encode_output_head(run, 1, at, len(data)) + data)
            at += len(data)
            self.sent += 1


async def test_output_that_is_not_read_stays_within_the_window():
    async with Floods() as server, server.open() as session:
        proc = await session.run("true", stdout=True)
        with pytest.raises(sb.SandboxExecutionError, match="beyond the window") as caught:
            await asyncio.wait_for(asyncio.shield(proc.wait()), 40)
        assert caught.value.code == "protocol"
        assert server.sent * server.size < 200 * MIB


DRIPS = 200_000


async def test_output_byte_by_byte_uses_no_more_memory_than_its_size():
    """One object for each byte would use forty times the limit."""

    class Drips(HostileServer):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
            for start in range(0, DRIPS, 20_000):
                frames = (
                    wire.encode_output_head(run, 1, at, 1) + b"x"
                    for at in range(start, start + 20_000)
                )
                await ws.send_bytes(b"".join(frames))
            await ws.send_bytes(
                wire.encode_end_of_output(run, 1, DRIPS) + wire.encode_end_of_output(run, 2, 0)
            )
            await ws.send_bytes(event(run, 1, EXITED))

    async with Drips() as server, server.open() as session:
        proc = await session.run("true")
        collector = proc._sink.collected[1]
        assert len(collector._chunks) < 200
        assert (await proc.communicate())[0] == b"x" * DRIPS
        proc = await session.run("true", stdout=True)
        await proc.wait()
        assert len(proc._sink.buffers[1]._chunks) < 1000
        assert (await proc.communicate())[0] == b"x" * DRIPS


@pytest.mark.parametrize("size", [10, 60_000])
async def test_endless_events_are_refused(size: int):
    class Decides(HostileServer):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
            payload = {"decision": {**DECISION, "reason": "x" * size}}
            for number in range(1, 20_000):
                await ws.send_bytes(event(run, number, payload))

    async with Decides() as server, server.open() as session:
        with pytest.raises(sb.SandboxExecutionError, match="events of") as caught:
            await session.exec("true")
        assert caught.value.code == "protocol"


STRANGE: dict[str, list[bytes]] = {
    "output of no stream": [wire.encode(wire.Kind.OUTPUT, 1, b"\x07" + bytes(8))],
    "output from the future": [wire.encode_output_head(1, 1, 2**60, 1) + b"x"],
    "an end in the future": [wire.encode_end_of_output(1, 1, 5)],
    "an event from the future": [event(1, 7, EXITED)],
    "two events in one": [event(1, 1, {**EXITED, "started": {"pid": 1}})],
    "no event": [event(1, 1, {"party": {}})],
    "an exit of 300": [event(1, 1, {"exited": {**EXITED["exited"], "returncode": 300}})],
    "an exit of -1": [event(1, 1, {"exited": {**EXITED["exited"], "returncode": -1}})],
    "an exit without usage": [event(1, 1, {"exited": {"returncode": 0, "reason": ""}})],
    "usage of no numbers": [event(1, 1, {"exited": {**EXITED["exited"], "usage": {"a": 1}}})],
    "refused after the start": [event(1, 1, {"refused": {"type": "SandboxError"}})],
    "a decision without values": [event(1, 1, {"decision": {}})],
    "taken, but never sent": [wire.encode_taken(1, wire.Taken(9, 2**40, broken=False))],
    "a frame for servers": [wire.encode(wire.Kind.ACK, 1, bytes(20))],
    "deep JSON": [wire.encode_numbered(wire.Kind.EVENT, 1, 1, b'{"a":' * 5000)],
    "not JSON": [wire.encode_numbered(wire.Kind.EVENT, 1, 1, b"\xff\xfe")],
    "a torn frame": [b"\x42\x00"],
    "an unknown kind": [b"\xee" + bytes(12)],
}


@pytest.mark.parametrize("name", STRANGE)
async def test_a_malformed_frame_is_a_sandbox_error(name: str):
    class Strange(HostileServer):
        async def run(self, ws: web.WebSocketResponse, run: int) -> None:
            await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
            for frame in STRANGE[name]:
                known = frame[:1] + struct.pack(">Q", run) + frame[9:] if len(frame) > 9 else frame
                await ws.send_bytes(known)

    async with Strange() as server, server.open() as session:
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await asyncio.wait_for(session.exec("true"), 40)
        assert caught.value.code == "protocol"


# The first call.


@pytest.mark.spec("E3", "I2")
async def test_the_first_call_can_copy_a_tree(quick: ServerProcess, tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "f").write_text("x")
    async with remote(quick) as session:
        assert (await session.upload(tmp_path / "in", "in")).files == 1
        assert await session.get_bytes("in/f") == b"x"
    async with remote(quick) as session:
        assert (await session.download(".", tmp_path / "out")).files == 0
    assert os.path.isdir(tmp_path / "out")
