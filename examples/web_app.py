"""A web page with a separate sandbox for every visitor.

    pip install '.[remote]'        # in a checkout, for aiohttp
    python examples/web_app.py [--backend userns] [--port 8000] [--idle 300] [--max-visitors 20]

A cookie identifies the visitor. The session opens with the first command and closes after an idle
time. The output of a command is streamed as server-sent events. Visitors, time and output are
limited, and each visitor runs one command at a time. Ctrl-C closes every session.

Prints::

    open http://127.0.0.1:...
    closed 2 sessions
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import hashlib
import hmac
import json
import secrets
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from union import sandbox as sb

COOKIE = "visitor"
LIMITS = sb.Resources(memory="256Mi", processes=32, file_size="16Mi", tmp="16Mi")
TIMEOUT_S = 10.0
MOST_OUTPUT = 256 * 1024
MOST_SOURCE = 64 * 1024
PAGE = Path(__file__).with_name("web_app.html").read_text(encoding="utf-8")
KEY = secrets.token_bytes(32)


def signed(name: str) -> str:
    """Return a signed cookie, so that the server stores nothing before the first command."""
    return f"{name}.{hmac.new(KEY, name.encode(), hashlib.sha256).hexdigest()}"


@dataclass(slots=True)
class Visitor:
    """One visitor's session; ``busy`` is held while a command runs."""

    session: sb.Session
    used: float = 0.0
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class App:
    """The web application: page, visitors and their commands."""

    def __init__(self, backend: str, max_visitors: int, idle_s: float) -> None:
        self._backend, self._max_visitors, self._idle_s = backend, max_visitors, idle_s
        self.visitors: dict[str, Visitor] = {}
        self.closed = 0

    async def page(self, request: web.Request) -> web.Response:
        """GET /: the page, and a cookie for new visitors."""
        nonce = secrets.token_urlsafe(16)
        response = web.Response(text=PAGE.replace("NONCE", nonce), content_type="text/html")
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        if not self._token(request):
            token = signed(secrets.token_urlsafe(24))
            response.set_cookie(COOKIE, token, httponly=True, samesite="Strict")
        return response

    def _token(self, request: web.Request) -> str:
        token = request.cookies.get(COOKIE, "")
        good = hmac.compare_digest(token.encode(), signed(token.rpartition(".")[0]).encode())
        return token if good else ""

    async def run(self, request: web.Request) -> web.StreamResponse:
        """POST /run with {"code": ..., "kind": "shell" or "python"}: stream the output."""
        token = self._token(request)
        # Pages of other sites, or of other ports of this host, must not run commands for a visitor.
        if not token or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise web.HTTPForbidden(text="load the page first")
        try:
            wanted = await request.json()
            kind, code = wanted["kind"], str(wanted["code"])
        except (ValueError, KeyError, TypeError) as exc:
            raise web.HTTPBadRequest(text="kind and code are needed, as JSON") from exc
        visitor = self.visitors.get(token)
        if visitor is None:
            if len(self.visitors) >= self._max_visitors:
                raise web.HTTPServiceUnavailable(text="too many visitors, come back later")
            session = sb.on_device.session(backend=self._backend, resources=LIMITS)
            visitor = self.visitors[token] = Visitor(session)
        if visitor.busy.locked():
            raise web.HTTPConflict(text="your last command still runs")
        async with visitor.busy:
            if not visitor.used:  # If this fails, expire() removes the visitor later.
                await visitor.session.open()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            try:
                await stream(response, visitor.session, code, kind)
            finally:
                visitor.used = time.monotonic()
        return response

    async def expire(self) -> None:
        """Close idle sessions periodically."""
        while True:
            await asyncio.sleep(min(1.0, self._idle_s / 4))
            late = time.monotonic() - self._idle_s
            for token, visitor in tuple(self.visitors.items()):
                if visitor.used < late and not visitor.busy.locked():
                    await self.close(token)

    async def close(self, token: str) -> None:
        """End a visitor's command and remove their files."""
        if visitor := self.visitors.pop(token, None):
            await visitor.session.close()
            self.closed += 1


async def stream(response: web.StreamResponse, session: sb.Session, code: str, kind: str) -> None:
    """Run the code; send its output up to a limit, then its exit code and reason."""

    async def send(event: str, data: object) -> None:
        await response.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

    # One stream for stdout and stderr keeps their order.
    command = ["python3", "-uc", code] if kind == "python" else ["sh", "-c", code]
    argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *command]
    proc = await session.run(argv, stdout=sb.PIPE, timeout_s=TIMEOUT_S)
    # A chunk may end in the middle of a character.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    room = MOST_OUTPUT
    try:
        async for data in proc.iter_stdout():
            await send("output", decoder.decode(data[:room]))
            room -= len(data)
            if room < 0:
                proc.kill()
                await send("output", "\n[too much output]\n")
                break
        await proc.wait()
        reason = proc.termination_reason if room >= 0 else "output"
        await send("end", {"code": proc.returncode, "reason": reason})
    finally:
        proc.kill()  # The visitor may have left. No effect if the command has ended.


async def main(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    handlers = App(args.backend, args.max_visitors, args.idle)
    app = web.Application(client_max_size=MOST_SOURCE)
    app.add_routes([web.get("/", handlers.page), web.post("/run", handlers.run)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", args.port)
    await site.start()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    expiring = asyncio.create_task(handlers.expire())
    print(f"open http://127.0.0.1:{runner.addresses[0][1]}/", flush=True)
    await ended.wait()
    expiring.cancel()
    await asyncio.gather(*map(handlers.close, tuple(handlers.visitors)))
    await runner.cleanup()
    print(f"closed {handlers.closed} sessions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sandbox for every visitor of a page.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds until a session ends")
    parser.add_argument("--max-visitors", type=int, default=20, help="concurrent visitors (20)")
    asyncio.run(main(parser.parse_args()))
