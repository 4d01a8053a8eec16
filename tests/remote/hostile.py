"""A scripted server: the protocol of a session, with any reply replaced by a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from aiohttp import WSMsgType, web

from union import sandbox as sb
from union.sandbox._wire import frames as wire
from union.sandbox._wire.frames import Kind

if TYPE_CHECKING:
    import ssl

FACTS: dict[str, Any] = {
    "work_dir": "/tmp/sandbox-work",
    "isolation": {"backend": "userns", "limits": {}},
    "fs_allowlist": {"read_only": [], "read_write": []},
    "grace_s": 2.0,
}
TOKEN = "a-token-that-only-its-server-may-see"


class HostileServer:
    """Replies like an honest server until a subclass overrides a method."""

    facts: dict[str, Any] = FACTS

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: Counter[str] = Counter()
        self.tokens: list[str] = []
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**30, middlewares=[self._count])
        session = "/v1/sessions/{name}"
        app.router.add_get("/v1/health", self.health)
        app.router.add_put(session, self.session)
        app.router.add_get(session, self.session)
        app.router.add_delete(session, self.ended)
        app.router.add_get(f"{session}/connect", self._connect)
        app.router.add_get(f"{session}/file", self.download)
        app.router.add_put(f"{session}/file", self.upload)
        app.router.add_post(session + "/files/{action}", self.files)
        app.router.add_route("*", "/{other:.*}", self.other)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        port = self._runner.addresses[0][1]
        self.endpoint = f"{'http' if self._tls is None else 'https'}://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    def open(self, **options: Any) -> sb.Session:
        reach = {"endpoint": self.endpoint, "token": TOKEN, "connect_timeout_s": 5.0}
        return sb.remote.session(**{**reach, **options})

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests[f"{request.method} {request.path.rpartition('/')[2][:10]}"] += 1
        if "Authorization" in request.headers:
            self.tokens.append(request.headers["Authorization"].removeprefix("Bearer "))
        return await handler(request)

    async def health(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "version": "0", "protocol": wire.VERSION})

    async def session(self, request: web.Request) -> web.StreamResponse:
        payload = {"session": request.match_info["name"], **self.facts}
        return web.Response(body=json.dumps(payload).encode(), content_type="application/json")

    async def ended(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"closed": True})

    async def download(self, _: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    async def upload(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"size": len(await request.read())})

    async def files(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"entries": []})

    async def other(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"entries": [], "size": 3})

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(protocols=(wire.PROTOCOL,))
        await ws.prepare(request)
        await self.connected(ws)
        return ws

    async def connected(self, ws: web.WebSocketResponse) -> None:
        async for message in ws:
            if message.type is WSMsgType.BINARY:
                for frame in wire.decode(message.data):
                    await self.frame(ws, frame)

    async def frame(self, ws: web.WebSocketResponse, frame: wire.Frame) -> None:
        if frame.kind is Kind.START:
            task = asyncio.ensure_future(self._run(ws, frame.run))
            self._tasks.add(task)
        elif frame.kind is Kind.CLOSE:
            await ws.send_bytes(wire.encode(Kind.CLOSED))
            await ws.close()

    async def _run(self, ws: web.WebSocketResponse, run: int) -> None:
        with contextlib.suppress(ConnectionError):  # The client may have disconnected.
            await self.run(ws, run)

    async def run(self, ws: web.WebSocketResponse, run: int) -> None:
        """One command: started, no output, exit code 0."""
        await ws.send_bytes(event(run, 0, {"started": {"pid": 2}}))
        await ws.send_bytes(b"".join(wire.encode_end_of_output(run, fd, 0) for fd in (1, 2)))
        await ws.send_bytes(event(run, 1, EXITED))


USAGE = {"cpu_user_s": 0, "cpu_system_s": 0, "max_rss_bytes": 0, "peak_memory_bytes": None}
EXITED = {"exited": {"returncode": 0, "reason": "", "usage": USAGE}}
DECISION = {
    "time": 0, "door": "tcp", "host": "h", "address": "", "port": 1, "allowed": False, "rule": "r",
    "reason": "x", "suggestion": "", "error": "", "bytes_up": 0, "bytes_down": 0, "duration_ms": 0,
}  # fmt: skip


def event(run: int, number: int, payload: dict[str, Any]) -> bytes:
    return wire.encode_numbered(Kind.EVENT, run, number, json.dumps(payload).encode())
