"""The WebSocket of a server that transports the frames of a session's runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from aiohttp import WSCloseCode, WSMsgType

from union.sandbox._wire.frames import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.web import WebSocketResponse

    from union.sandbox.server._quotas import FrameBudget

__all__ = ["WebSocket"]

_CONTROLS_PER_TURN: Final = 32
"""Pings and pongs that are read before other connections get their turn."""


class WebSocket:
    """The server's end of a WebSocket (a ``MessageStream``)."""

    def __init__(self, ws: WebSocketResponse, budget: FrameBudget) -> None:
        self._ws = ws
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
                raise WireError(f"WebSocket messages must be binary, got {message.type.name}")
            await self._count_control()

    async def _count_control(self) -> None:
        """Count pings and pongs against the frame budget of the key."""
        self._controls += 1
        if self._controls >= _CONTROLS_PER_TURN:
            self._controls = 0
            await asyncio.sleep(self._budget.spend(_CONTROLS_PER_TURN))

    async def send(self, pieces: Sequence[bytes]) -> bool:
        """Send one message; return False if the connection is closed."""
        try:
            await self._ws.send_bytes(b"".join(pieces))
        except ConnectionError:
            return False
        return True

    async def close(self, why: str = "") -> None:
        """Close the connection, with ``why`` as the reason of a policy violation."""
        if why:
            message = why[:100].encode()
            await self._ws.close(code=WSCloseCode.POLICY_VIOLATION, message=message)
        else:
            await self._ws.close()

    @property
    def close_reason(self) -> str:
        return f"closed with {self._ws.close_code}"
