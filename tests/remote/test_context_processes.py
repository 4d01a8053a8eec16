"""The list of a context's processes comes from a server that need not be honest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.remote.hostile import event
from tests.remote.test_contexts import DONE, Contexts

from union.sandbox._contexts.wire import ContextChange, encode_change
from union.sandbox._wire.frames import Kind
from union.sandbox.errors import SandboxConnectionError

if TYPE_CHECKING:
    from aiohttp import web

    from union.sandbox._wire import frames as wire

PROCESS = {
    "pid": 2, "parent": 1, "name": "python", "command": ["python"], "started_at": 1.0,
    "cpu_s": 0.5, "memory_bytes": 4096, "left_behind": False,
}  # fmt: skip
LISTS = {
    "nothing": None,
    "no list": {},
    "a pid that is text": {"processes": [{**PROCESS, "pid": "2"}]},
    "a long command": {"processes": [{**PROCESS, "command": ["x" * 5000]}]},
    "too many": {"processes": [PROCESS] * 4097},
}


class Listing(Contexts):
    """Replies to the request for processes with this value."""

    listed: object = None

    async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
        if frame.kind is Kind.CONTROL and b'"processes"' in bytes(frame.payload):
            change = ContextChange(0, alive=True, reply=1, value=self.listed)
            await ws.send_bytes(event(frame.run, 1, encode_change(change)))
            return
        await super().frame(ws, frame)


@pytest.mark.threat(160)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", LISTS)
async def test_a_hostile_list_of_processes_is_a_protocol_error(what):
    hostile, honest = Listing(DONE), Listing(DONE)
    hostile.listed, honest.listed = LISTS[what], {"processes": [PROCESS]}
    async with hostile as server, server.open() as session:
        ctx = await session.context().open()
        with pytest.raises(SandboxConnectionError) as caught:
            await ctx.processes()
        assert caught.value.code == "protocol"
    async with honest as server, server.open() as session:
        ctx = await session.context().open()
        (process,) = await ctx.processes()
        assert (process.pid, process.command) == (2, ("python",)), "positive control"
