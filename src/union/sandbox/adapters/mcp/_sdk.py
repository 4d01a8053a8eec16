"""The differences between the MCP SDK 1.x and 2.x."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from typing import TYPE_CHECKING, Any, Final

try:
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import CallToolResult, ImageContent, TextContent, ToolAnnotations

    IS_2X = True
except ImportError:  # the SDK is 1.x
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError
    from mcp.types import CallToolResult, ImageContent, TextContent, ToolAnnotations

    IS_2X = False

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = [
    "IS_2X",
    "CallToolResult",
    "Context",
    "ImageContent",
    "TextContent",
    "ToolAnnotations",
    "ToolError",
    "hints",
    "http_app",
    "image",
    "make_server",
    "refuse",
    "result",
    "serve_http",
    "serve_stdio",
]


UNAUTHORIZED: Final = 401


def make_server(name: str, *, version: str, instructions: str, on_end: Callable[[], None]) -> Any:
    """Return the SDK's server. ``on_end`` is called when a server on stdio or in memory ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        try:
            yield None
        finally:
            if not is_shared(server):
                await asyncio.to_thread(on_end)

    options: dict[str, Any] = {"instructions": instructions, "lifespan": lifespan}
    if IS_2X:
        options |= {"version": version, "title": "Sandbox"}
    server = MCPServer(name, log_level="WARNING", **options)
    server.sandbox_close = on_end
    return server


def is_shared(server: Any) -> bool:
    """Return whether the server has several clients, whose connections end no sandbox."""
    return bool(getattr(server, "serves_http", False))


def hints(*, read_only: bool, destructive: bool, idempotent: bool, open_world: bool) -> Any:
    """Return the hints of a tool."""
    return ToolAnnotations(
        readOnlyHint=read_only,
        destructiveHint=destructive,
        idempotentHint=idempotent,
        openWorldHint=open_world,
    )


def result(content: list[Any], structured: dict[str, Any]) -> Any:
    """Return a tool result with content blocks and structured content."""
    return CallToolResult(content=content, structuredContent=structured)


def image(data: str, mime_type: str) -> Any:
    """Return an image as a content block; ``data`` is base64."""
    return ImageContent(type="image", data=data, mimeType=mime_type)


# Transports.


def serve_stdio(server: Any) -> None:
    """Serve one client on stdin and stdout."""
    server.run("stdio")


def http_app(server: Any, host: str) -> Any:
    """Return the ASGI application of a server that several clients use."""
    server.serves_http = True
    if IS_2X:
        return server.streamable_http_app(host=host)
    server.settings.host = host
    return server.streamable_http_app()


def serve_http(server: Any, *, host: str, port: int, token: str) -> None:
    """Serve clients over streamable HTTP until the process is interrupted."""
    import uvicorn

    app = http_app(server, host)
    try:
        uvicorn.run(_Guard(app, token) if token else app, host=host, port=port, log_level="warning")
    finally:
        server.sandbox_close()


class _Guard:
    """Refuse HTTP requests without the token, before the application sees them."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            scheme = re.compile(rb"bearer ", re.IGNORECASE)
            sent = scheme.sub(b"Bearer ", given[0], count=1) if len(given) == 1 else b""
            if not hmac.compare_digest(sent, self._expected):
                await refuse(send, 401, "invalid token")
                return
        await self._app(scope, receive, send)


async def refuse(send: Any, status: int, message: str) -> None:
    """Send an HTTP response that refuses a request."""
    headers = [(b"content-type", b"application/json")]
    if status == UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": message}).encode()})
