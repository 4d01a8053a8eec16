"""A WebSocket as what carries the runs of a session to its client."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, Self

from aiohttp import WSCloseCode, WSMsgType

from union.sandbox._wire.frames import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.web import BaseRequest, WebSocketResponse

    from union.sandbox.server._shares import FrameBudget

__all__ = ["WebSocket"]

_SHORT: Final = struct.Struct(">BB")
_MIDDLE: Final = struct.Struct(">BBH")
_LONG: Final = struct.Struct(">BBQ")
_WHOLE_BINARY: Final = 0x82
_CONTROLS: Final = 32
"""Pings and pongs that are read before other connections have their turn."""


class WebSocket:
    """The server's end of one (a ``MessageStream``)."""

    def __init__(self, ws: WebSocketResponse, request: BaseRequest, budget: FrameBudget) -> None:
        self._ws = ws
        self._request = request
        self._budget = budget
        self._controls = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            message = await anext(self._ws)
            if message.type is WSMsgType.BINARY:
                data: bytes = message.data
                if not data:
                    raise WireError("empty message")
                return data
            if message.type is WSMsgType.PING:
                await self._ws.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                raise WireError("a message that is not binary")
            await self._count_control()

    async def _count_control(self) -> None:
        """Pings need no frame of ours, and count all the same."""
        self._controls += 1
        if self._controls >= _CONTROLS:
            self._controls = 0
            await asyncio.sleep(self._budget.spend(_CONTROLS))

    async def send(self, pieces: Sequence[bytes]) -> bool:
        """One message, in one go.

        Not by ``send_bytes``, which would send the head of a large one by itself, after the pieces
        had been put together: every byte twice in memory, and a client woken by nothing.
        """
        transport = self._request.transport
        if self._ws.closed or transport is None or transport.is_closing():
            return False
        transport.write(b"".join((_message_head(sum(map(len, pieces))), *pieces)))
        try:
            await self._request.writer.drain()
        except ConnectionError:
            return False
        return True

    async def close(self, why: str = "") -> None:
        if why:
            message = why[:100].encode()
            await self._ws.close(code=WSCloseCode.POLICY_VIOLATION, message=message)
        else:
            await self._ws.close()

    @property
    def close_reason(self) -> str:
        return f"closed with {self._ws.close_code}"


def _message_head(size: int) -> bytes:
    """What a server puts before a whole binary message (RFC 6455, 5.2); servers do not mask."""
    if size < 126:
        return _SHORT.pack(_WHOLE_BINARY, size)
    if size < 1 << 16:
        return _MIDDLE.pack(_WHOLE_BINARY, 126, size)
    return _LONG.pack(_WHOLE_BINARY, 127, size)
