"""A WebSocket as what carries the runs of a session to its client."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Self

from aiohttp import WSCloseCode, WSMsgType

from union.sandbox._core.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.web import BaseRequest, WebSocketResponse

__all__ = ["WebSocket"]

_SHORT: Final = struct.Struct(">BB")
_MIDDLE: Final = struct.Struct(">BBH")
_LONG: Final = struct.Struct(">BBQ")
_WHOLE_BINARY: Final = 0x82


class WebSocket:
    """The server's end of one (a ``Carrier``)."""

    def __init__(self, ws: WebSocketResponse, request: BaseRequest) -> None:
        self._ws = ws
        self._request = request

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        message = await anext(self._ws)
        if message.type is not WSMsgType.BINARY:
            raise WireError("a message that is not binary")
        data: bytes = message.data
        return data

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
    def end(self) -> str:
        return f"closed with {self._ws.close_code}"


def _message_head(size: int) -> bytes:
    """What a server puts before a whole binary message (RFC 6455, 5.2); servers do not mask."""
    if size < 126:
        return _SHORT.pack(_WHOLE_BINARY, size)
    if size < 1 << 16:
        return _MIDDLE.pack(_WHOLE_BINARY, 126, size)
    return _LONG.pack(_WHOLE_BINARY, 127, size)
