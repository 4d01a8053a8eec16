"""The client's end of a WebSocket, as a ``MessageStream``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import aiohttp

from union.sandbox._wire.frames import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WebSocket"]


class WebSocket:
    """The client's end of a WebSocket (a ``MessageStream``)."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        message = await anext(self._ws)
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise WireError(f"expected a binary message, got {message.type.name}")
        data: bytes = message.data
        return data

    async def send(self, pieces: Sequence[bytes]) -> bool:
        try:
            await self._ws.send_bytes(b"".join(pieces))
        except (ConnectionError, aiohttp.ClientError):
            return False
        return True

    async def close(self, why: str = "") -> None:  # noqa: ARG002 - a client sends no reason
        await self._ws.close()

    @property
    def close_reason(self) -> str:
        return str(self._ws.exception() or f"closed with {self._ws.close_code}")
