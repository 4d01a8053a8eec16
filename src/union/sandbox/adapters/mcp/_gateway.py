"""MCP for the clients of a server: each request acts with the key that it carries.

A client of ``sandbox-server --mcp`` sends the server's key as its bearer token. Its sandboxes are
sessions of the server that were opened with that key, so the server's policy, quotas and records
apply to them as to all others. Clients with different keys share nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from union.sandbox.adapters.mcp import _sdk
from union.sandbox.errors import PolicyError, SandboxConnectionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Gateway", "listen", "serve"]

MAX_KEYS: Final = 64
CHECKED_FOR_S: Final = 5.0
"""How long a key that the server has accepted is not checked again."""
CHECK_TIMEOUT_S: Final = 10.0
_BEARER: Final = re.compile(rb"bearer +([!-~]{1,4096})", re.IGNORECASE)


class _Client:
    """The MCP server of one key, with its life cycle."""

    def __init__(self, server: Any, host: str) -> None:
        self._server = server
        self.app = _sdk.http_app(server, host)
        self.checked = 0.0
        self._is_ready = asyncio.Event()
        self._is_over = asyncio.Event()
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                self._is_ready.set()
                await self._is_over.wait()
        finally:
            self._is_ready.set()
            await asyncio.to_thread(self._server.sandbox_close)

    async def ready(self) -> None:
        await self._is_ready.wait()
        if self._task.done():
            await self._task  # raises why it has ended

    async def close(self) -> None:
        self._is_over.set()
        await asyncio.gather(self._task, return_exceptions=True)


class Gateway:
    """An ASGI application that hands each request to the MCP server of its key.

    Args:
        endpoint: the address of the sandbox server.
        cert: as for ``remote.session()``; None (default) for the system's trust store.
        host: the address that clients use, for the check of the Host header.
        make: returns an MCP server for a key.

    """

    def __init__(
        self, *, endpoint: str, cert: str | None, host: str, make: Callable[[str | None], Any]
    ) -> None:
        self._endpoint = endpoint
        self._cert = cert
        self._host = host
        self._make = make
        self._clients: dict[bytes, _Client] = {}
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            client = await self._client(_key(scope["headers"]))
        except _RefusedError as exc:
            await _sdk.refuse(send, exc.status, exc.message)
            return
        await client.app(scope, receive, send)

    async def _client(self, key: str | None) -> _Client:
        name = hashlib.sha256((key or "").encode()).digest()
        async with self._lock:
            client = self._clients.get(name)
            if client is None or time.monotonic() - client.checked > CHECKED_FOR_S:
                await self._check(key)
                if client is None:
                    if len(self._clients) >= MAX_KEYS:
                        raise _RefusedError(429, f"too many keys ({MAX_KEYS})")
                    client = self._clients[name] = _Client(self._make(key), self._host)
                client.checked = time.monotonic()
        await client.ready()
        return client

    async def _check(self, key: str | None) -> None:
        """Have the server check a key."""
        from union.sandbox.remote._access import resolve_access
        from union.sandbox.remote._http import HttpClient

        access = resolve_access(
            self._endpoint,
            token=key,
            cert=self._cert,
            connect_timeout_s=CHECK_TIMEOUT_S,
            lazy=True,
        )
        http = HttpClient(access.endpoint, token=access.token, ca=access.ca)
        try:
            await http.call("GET", "sessions", within_s=CHECK_TIMEOUT_S)
        except PolicyError as exc:
            raise _RefusedError(403, "this key cannot open sessions") from exc
        except SandboxConnectionError as exc:
            if exc.code == "unauthorized":
                message = "a token is required" if key is None else "invalid token"
                raise _RefusedError(401, message) from exc
            raise _RefusedError(502, "the sandbox server does not reply") from exc
        finally:
            await http.close()

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await asyncio.gather(*(client.close() for client in self._clients.values()))
                await send({"type": "lifespan.shutdown.complete"})
                return


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def _key(headers: list[tuple[bytes, bytes]]) -> str | None:
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        return None
    found = _BEARER.fullmatch(given[0].strip()) if len(given) == 1 else None
    if found is None:
        raise _RefusedError(401, "the header Authorization must be 'Bearer TOKEN'")
    return found[1].decode("ascii")


# The process.


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except BaseException:
            found.close()
            raise
    except OSError as exc:
        raise SandboxUsageError(
            f"--http {host}:{port}: {exc.strerror or exc}", argument="--http"
        ) from exc
    return found


async def serve(app: Any, sock: socket.socket, *, is_child: bool, tls: Mapping[str, str]) -> None:
    """Serve until SIGTERM or SIGINT; with ``is_child``, until stdin ends."""
    config = uvicorn.Config(
        app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5, **dict(tls)
    )
    server = uvicorn.Server(config)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if tls else 'http'}://{shown}:{port}/mcp"
    if is_child:
        await _follow_stdin(server)
        print(json.dumps({"ready": url}), flush=True)  # noqa: T201 - to the server that started it
    else:
        sys.stderr.write(f"sbx: serving MCP at {url}\n")
    await server.serve(sockets=[sock])


async def _follow_stdin(server: uvicorn.Server) -> None:
    class Watch(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            del exc
            server.should_exit = True

    with contextlib.suppress(ValueError):  # stdin is a file: nothing ends with it
        await asyncio.get_running_loop().connect_read_pipe(Watch, sys.stdin)
