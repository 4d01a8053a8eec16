"""Runs for whoever has nothing but an HTTP client: one request, lines of JSON, the end in the body.

With an ``Idempotency-Key`` the same request may be sent again: it does not run a second time but
goes on where the client says it is (``stdout=`` and ``stderr=`` in the query), as far back as
output is still kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from aiohttp import web

from union.sandbox._core.resolve import resolve_run
from union.sandbox._core.wire import WINDOW, Offsets, WireError, parse_json
from union.sandbox.constants import DEVNULL, PIPE
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._bodies import HEADERS, read_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import ServerSession, Sessions

__all__ = ["run_in", "run_once"]

_MOST_COMMAND: Final = 16 * 1024 * 1024
_KEPT: Final = 512 * 1024
"""How much of a stream can be asked for again, where there is a key to ask with."""
_NAMES: Final = {1: "stdout", 2: "stderr"}
_RUN: Final = frozenset(
    {
        "cmd", "script_type", "stdin", "env", "cwd", "network_mode", "network_allowlist",
        "timeout_s", "stdout", "stderr",
    }
)  # fmt: skip


async def run_once(request: web.BaseRequest, sessions: Sessions) -> web.StreamResponse:
    """A run in a session of its own, which ends with it."""
    told = await _described(request)
    session = await sessions.open(secrets.token_hex(16), told.pop("session", None) or {})
    session.hold()
    try:
        return await _run(request, session, told)
    finally:
        session.release()
        await sessions.close(session, "done")


async def run_in(request: web.BaseRequest, session: ServerSession) -> web.StreamResponse:
    """A run in a session that is open."""
    return await _run(request, session, await _described(request))


async def _described(request: web.BaseRequest) -> dict[str, Any]:
    """The command: a JSON object with the arguments of ``run()``, or just its text."""
    body = await read_body(request, most=_MOST_COMMAND)
    if request.content_type == "application/json":
        return parse_json(body, most=_MOST_COMMAND)
    try:
        return {"cmd": body.decode()}
    except UnicodeDecodeError as exc:
        raise WireError("the command is not text") from exc


async def _run(
    request: web.BaseRequest, session: ServerSession, told: dict[str, Any]
) -> web.StreamResponse:
    key = request.headers.get("Idempotency-Key")
    if key is None:
        number = secrets.randbits(63)
    else:
        number = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8]) >> 1
    run = session.runs.get(number)
    known = _known(request)
    if run is None:
        if known != Offsets():
            raise SandboxUsageError(
                "there is nothing to go on with: this run is not known (any more)",
                argument="Idempotency-Key",
                code="run-lost",
            )
        run = session.launch(number, _spec(session, told))
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
    stream = _Lines(run, keep=_KEPT if key is not None else 0)
    try:
        run.attach(stream, known)
    except WireError as exc:
        raise SandboxUsageError(f"{exc}", argument="Idempotency-Key", code="run-lost") from exc
    try:
        await response.prepare(request)
        async for line in stream.lines():
            await response.write(line)
        await response.write_eof()
    finally:
        if key is None:
            # Nobody can ask for it again.
            run.end("closed")
            session.runs.pop(number, None)
            run.let_go()
        else:
            session.detach(run, stream)
    return response


def _known(request: web.BaseRequest) -> Offsets:
    query = parse_qs(request.rel_url.raw_query_string, max_num_fields=8)
    try:
        return Offsets(int(query.get("stdout", ["0"])[-1]), int(query.get("stderr", ["0"])[-1]))
    except ValueError:
        raise SandboxUsageError("stdout and stderr are offsets: numbers") from None


def _spec(session: ServerSession, told: dict[str, Any]) -> Any:
    if unknown := told.keys() - _RUN:
        raise SandboxUsageError(f"a run has no argument {min(unknown)!r}", argument=min(unknown))
    options = dict(told)
    cmd = options.pop("cmd", None)
    stdin = options.pop("stdin", None)
    for name in ("stdout", "stderr"):
        options[name] = PIPE if options.get(name, True) is not False else DEVNULL
    if stdin is not None and not isinstance(stdin, str):
        raise SandboxUsageError("stdin must be text", argument="stdin")
    return resolve_run(
        session.spec, cmd, stdin=None if stdin is None else stdin.encode(), **options
    )


class _Lines:
    """A listener that turns what a run says into lines; what it has handed on is acknowledged."""

    def __init__(self, run: ServerRun, *, keep: int) -> None:
        self._run = run
        self._keep = keep
        self._wake = asyncio.Event()

    def notify(self, _: ServerRun) -> None:
        self._wake.set()

    async def lines(self) -> Any:
        log = self._run.log
        while True:
            await self._wake.wait()
            self._wake.clear()
            while log.has_more:
                for line in self._next():
                    yield line
                self._acknowledge()
            if log.ended and all(s.closed_sent for s in log.streams.values()):
                # The end comes last, behind all output.
                yield self._end + b"\n"
                return

    def _next(self) -> Iterator[bytes]:
        log = self._run.log
        for _, event in log.events.unsent(WINDOW):
            if event.startswith((b'{"exited"', b'{"failed"', b'{"refused"')):
                self._end = event
            else:
                yield event + b"\n"
        for fd, stream in log.streams.items():
            for offset, data in stream.unsent(WINDOW):
                yield _line(fd, offset, data)
            stream.closed_sent = stream.closed and stream.sent == stream.end

    def _acknowledge(self) -> None:
        streams = self._run.log.streams
        done = {fd: max(s.acked, s.sent - self._keep) for fd, s in streams.items()}
        # Events are few and small: with a key, all of them can be told again.
        events = self._run.log.events
        known = events.acked if self._keep else events.sent
        self._run.ack(Offsets(done.get(1, 0), done.get(2, 0), known))

    _end: bytes = b""


def _line(fd: int, offset: int, data: bytes) -> bytes:
    """Text where it is text; otherwise base64, so that nothing is lost."""
    told: dict[str, Any] = {"stream": _NAMES[fd], "offset": offset}
    try:
        told["text"] = data.decode()
    except UnicodeDecodeError:
        told["base64"] = base64.b64encode(data).decode()
    return json.dumps(told).encode() + b"\n"
