"""Bodies of requests that are read whole: small, and soon there. And what every answer says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.frames import parse_json
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from aiohttp import web

    from union.sandbox.server._shares import Charge

__all__ = ["HEADERS", "read_body", "read_json"]

HEADERS: Final = {
    "Server": "sandbox-server",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer: no versions for strangers, nothing kept, nothing guessed."""

_MOST_BODY: Final = 4 * 1024 * 1024
_BODY_TIMEOUT_S: Final = 30.0


async def read_body(request: web.BaseRequest, *, most: int = _MOST_BODY) -> bytes:
    """A whole body, if it is small and comes soon."""
    charge: Charge = request["charge"]
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                charge.grow(len(chunk))
                data += chunk
                if len(data) > most:
                    raise SandboxUsageError(
                        f"the body takes more than {most} bytes", code="too-large"
                    )
    except TimeoutError as exc:
        raise SandboxUsageError("the body took too long", code="too-slow") from exc
    return bytes(data)


async def read_json(request: web.BaseRequest) -> dict[str, Any]:
    body = await read_body(request)
    return parse_json(body, max_bytes=_MOST_BODY) if body else {}
