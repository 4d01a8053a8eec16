"""Clients back off before they reconnect, and a run refused as busy waits for its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import SOON_S
from tests.remote.conftest import remote
from tests.remote.hostile import HostileServer, event
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._wire import frames as wire
from union.sandbox.remote import _transport

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.threat(159), pytest.mark.timeout(120)]


class Hangs(HostileServer):
    """A server that accepts every connection and closes it at once."""

    async def connected(self, ws: web.WebSocketResponse) -> None:
        await ws.close()


class Teases(HostileServer):
    """A server that closes every connection after one frame without progress."""

    frame_of = staticmethod(lambda _: b"")

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        if frame := self.frame_of(run):
            await ws.send_bytes(frame)
        await ws.close()


async def test_a_connection_that_is_lost_at_once_is_retried_with_a_pause():
    async with HostileServer() as server, server.open() as session:
        await session.exec("true")
        assert server.requests["GET connect"] == 1, "the control"
    async with Hangs() as server, server.open() as session:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(sb.SandboxError) as caught:
            await session.exec("true")
        assert asyncio.get_running_loop().time() - begun < SOON_S
        assert "connection" in str(caught.value)
        # Two seconds of grace: 0.05 s at first, and twice as long each time.
        assert server.requests["GET connect"] <= 12


@pytest.mark.parametrize(
    "frame",
    [lambda _: b"", lambda run: wire.encode_output_head(run, 1, 0, 0)],
    ids=["nothing", "an empty frame"],
)
async def test_a_connection_without_progress_does_not_reset_the_backoff(frame: Any):
    class Server(Teases):
        frame_of = staticmethod(frame)

    async with Server() as server, server.open() as session:
        with pytest.raises(sb.SandboxError):
            await session.exec("true")
        assert server.requests["GET connect"] <= 12


async def test_a_brief_connection_with_progress_is_retried_with_a_pause():
    """One byte for each connection: the run makes progress, but with pauses."""

    class Drips(HostileServer):
        at = 0

        async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
            if frame.kind in {wire.Kind.START, wire.Kind.ATTACH} and not ws.closed:
                if not self.at:
                    await ws.send_bytes(event(frame.run, 0, {"started": {"pid": 2}}))
                await ws.send_bytes(wire.encode_output_head(frame.run, 1, self.at, 1) + b"x")
                self.at += 1
                await ws.close()

    async with Drips() as server, server.open() as session:
        proc = await session.run("true", stdout=True)
        await asyncio.sleep(2)
        made = server.requests["GET connect"]
        assert made <= 90, made
        async with asyncio.timeout(SOON_S):
            while server.requests["GET connect"] < 3:  # It goes on trying.
                await asyncio.sleep(0.05)
        del proc


class Busy(HostileServer):
    """A server with a limited number of concurrent commands, each of which takes a moment."""

    def __init__(self, room: int, *, lasts_s: float = 0.02) -> None:
        super().__init__()
        self.room, self.lasts_s = room, lasts_s
        self.running = self.most = self.refused = 0

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        if self.running >= self.room:
            self.refused += 1
            error = {"type": "SandboxExecutionError", "message": "no room", "code": "busy"}
            await ws.send_bytes(event(run, 0, {"refused": error}))
            return
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.lasts_s)
        self.running -= 1
        await super().run(ws, run)


async def test_commands_beyond_the_capacity_of_a_server_wait_for_their_turn():
    async with Busy(8) as server, server.open() as session:
        done = await asyncio.gather(*(session.exec("true") for _ in range(400)))
        assert [result.returncode for result in done] == [0] * 400
        assert server.most == 8
        assert server.refused < 400, "a command is not sent again and again"


async def test_a_server_that_stays_busy_is_given_up_with_its_own_reason(monkeypatch):
    monkeypatch.setattr(_transport, "_MAX_BUSY_WAIT_S", 0.5)
    async with Busy(0) as server, server.open() as session:
        calls = (session.exec("true") for _ in range(50))
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert Counter((type(e), e.code) for e in done) == {(sb.SandboxExecutionError, "busy"): 50}
        assert server.refused < 100
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await session.exec("true", timeout_s=0.2)
        assert caught.value.code == "busy"


async def test_cancelled_calls_pass_their_turn_to_others():
    async with Busy(1, lasts_s=0.05) as server, server.open() as session:
        calls = [asyncio.ensure_future(session.exec("true")) for _ in range(30)]
        await asyncio.sleep(0.1)
        for call in calls[::2]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(result.returncode == 0 for result in done[1::2])
        assert (await session.exec("true")).returncode == 0


async def test_closing_a_session_leaves_no_call_waiting():
    async with Busy(1, lasts_s=30) as server:
        async with server.open() as session:
            calls = [asyncio.ensure_future(session.exec("true")) for _ in range(20)]
            await asyncio.sleep(0.2)
        done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 40)
        assert all(isinstance(result, sb.SandboxError) for result in done)


@pytest.mark.parametrize("most", ["256", "4"])
async def test_many_commands_at_once_all_end(most: str):
    with ServerProcess("--max-runs", most) as server:
        count = 800 if most == "256" else 100
        async with remote(server) as session:
            done = await asyncio.gather(*(session.exec(f"echo {i}") for i in range(count)))
        assert [result.stdout for result in done] == [f"{i}\n" for i in range(count)]
        assert server.metric("sandbox_frames_bad_total") == 0
