"""RemoteCheckpoints: the checkpoints of a session on a server.

A call that changes something has a key. If the connection drops before the reply, the call is sent
again with that key, and the server replies with the outcome of the first one.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Any, Final, TypeVar

from union.sandbox._checkpoints.values import Fork
from union.sandbox._checkpoints.wire import (
    MAX_DIFF,
    decode_changes,
    decode_checkpoint,
    decode_checkpoints,
    decode_layers,
)
from union.sandbox.errors import SandboxConnectionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

    from union.sandbox._checkpoints.values import CheckpointInfo, TreeChange
    from union.sandbox.remote._transport import RemoteTransport

__all__ = ["RemoteCheckpoints"]

_T = TypeVar("_T")
_CALL_S: Final = 600.0
"""How long a call may take: where there are no layers, the work dir is copied."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
_MAX_ARCHIVE: Final = 2**50
_MAX_LIST: Final = 1024 * 1024
_MAX_REPLY: Final = 64 * 1024


class RemoteCheckpoints:
    """The ``CheckpointCalls`` of a session on a server."""

    def __init__(self, transport: RemoteTransport) -> None:
        self._transport = transport

    async def checkpoint(self, name: str) -> CheckpointInfo:
        return self._decode(await self._change("take", name=name))

    async def rollback(self, checkpoint_id: str, *, keeps_contexts: bool) -> None:
        contexts = "keep" if keeps_contexts else "end"
        await self._change("rollback", checkpoint=checkpoint_id, contexts=contexts)

    async def drop_checkpoint(self, checkpoint_id: str) -> None:
        await self._change("drop", checkpoint=checkpoint_id)

    async def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        payload = await self._call("list", {}, max_bytes=_MAX_LIST)
        return self._transport.decode(decode_checkpoints, payload)

    async def diff(self, checkpoint_id: str, *, content: bool) -> tuple[TreeChange, ...]:
        return await self._repeated(lambda: self._diff(checkpoint_id, content=content))

    async def _diff(self, checkpoint_id: str, *, content: bool) -> tuple[TreeChange, ...]:
        transport = self._transport
        http = await transport.connected_http()
        pieces = http.fetch(
            transport.name,
            "",
            max_bytes=MAX_DIFF,
            route="checkpoints/diff",
            query={"checkpoint": checkpoint_id, "content": str(int(content))},
        )
        found: list[TreeChange] = []
        try:
            async for piece in pieces:
                decode = functools.partial(decode_changes, already=len(found))
                found += transport.decode(decode, piece)
        finally:
            await pieces.aclose()
        return tuple(found)

    async def export_checkpoint(self, checkpoint_id: str) -> AsyncIterator[bytes]:
        transport = self._transport
        http = await transport.connected_http()
        pieces = http.fetch(
            transport.name,
            "",
            max_bytes=_MAX_ARCHIVE,
            route="checkpoints/export",
            query={"checkpoint": checkpoint_id},
        )
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def import_checkpoint(self, name: str, chunks: AsyncIterable[bytes]) -> CheckpointInfo:
        transport = self._transport
        http = await transport.connected_http()
        reply = await http.upload(
            transport.name, "", chunks, route="checkpoints/import", query={"name": name}
        )
        return self._decode(reply)

    async def adopt(self, other: object) -> CheckpointInfo:
        theirs = getattr(other, "checkpoint_calls", None)
        here = self.where
        there = theirs.where if isinstance(theirs, RemoteCheckpoints) else None
        if there is None or there[0] != here[0] or there == here:
            raise SandboxUsageError(
                "adopt() needs another session of the same server",
                argument="other",
                hint="export() a checkpoint of the other session and import_checkpoint() it here",
            )
        return self._decode(await self._change("adopt", session=there[1]))

    @property
    def where(self) -> tuple[str, str]:
        """The server and the name of the session."""
        return self._transport.endpoint, self._transport.name

    def fork(self, checkpoint_id: str) -> Fork:
        name = os.urandom(16).hex()
        return Fork(lambda: self._transport.forked(name, checkpoint_id), name)

    async def _change(self, action: str, **fields: str) -> dict[str, Any]:
        """Perform a call that changes something, once."""
        return await self._call(action, {"key": os.urandom(16).hex(), **fields})

    async def _call(
        self, action: str, payload: dict[str, str], *, max_bytes: int = _MAX_REPLY
    ) -> dict[str, Any]:
        transport = self._transport
        http = await transport.connected_http()
        path = transport.path(f"/checkpoints/{action}")
        reply = await self._repeated(
            lambda: http.call("POST", path, payload, within_s=_CALL_S, max_bytes=max_bytes)
        )
        self._note_layers(reply)
        return reply

    async def _repeated(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call whose connection drops, as long as the server keeps the session."""
        await self._transport.connected_http()
        loop = asyncio.get_running_loop()
        give_up: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await call()
            except SandboxConnectionError as exc:
                if exc.code != "connection":
                    raise
                now = loop.time()
                give_up = now + self._transport.grace_s if give_up is None else give_up
                if now + pause_s > give_up:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _decode(self, payload: dict[str, Any]) -> CheckpointInfo:
        self._note_layers(payload)
        return self._transport.decode(decode_checkpoint, payload)

    def _note_layers(self, payload: dict[str, Any]) -> None:
        layers = self._transport.decode(lambda p: decode_layers(p["layers"]), payload)
        self._transport.note_layers(layers)
