"""Runs for whoever has nothing but an HTTP client: one request, lines of JSON, the end in the body.

With an ``Idempotency-Key`` the same request may be sent again: it does not run a second time but
goes on where the client says it is (``stdout=`` and ``stderr=`` in the query), as far back as
output is still kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import secrets
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from aiohttp import web

from union.sandbox._core.events import Failed
from union.sandbox._core.resolve import resolve_run
from union.sandbox._wire.frames import WINDOW, Offsets, WireError, parse_json
from union.sandbox._wire.values import encode_event
from union.sandbox.constants import DEVNULL, PIPE
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Grant
from union.sandbox.server._bodies import HEADERS, read_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import ServerSession, Sessions

__all__ = ["run_in", "run_once"]

_MOST_COMMAND: Final = 16 * 1024 * 1024
_KEPT: Final = 512 * 1024
"""How much of a stream can be asked for again, where there is a key to ask with."""
_MAX_KEY: Final = 255
_OFFSET: Final = re.compile(r"[0-9]{1,18}")
_NAMES: Final = {1: "stdout", 2: "stderr"}
_SUPERSEDED: Final = (
    encode_event(
        Failed(
            "transport",
            "the same request came again on another connection, which carries the run from here on",
            "superseded",
            "",
        )
    )
    + b"\n"
)
_RUN: Final = frozenset(
    {
        "cmd", "script_type", "stdin", "env", "cwd", "network_mode", "network_allowlist",
        "timeout_s", "stdout", "stderr",
    }
)  # fmt: skip


async def run_once(request: web.BaseRequest, sessions: Sessions) -> web.StreamResponse:
    """A run in a session of its own, which ends with it."""
    if "Idempotency-Key" in request.headers:
        raise SandboxUsageError(
            "POST /v1/run keeps nothing that could be asked for again: it takes no Idempotency-Key",
            argument="Idempotency-Key",
            hint="open a session and send the command to POST /v1/sessions/ID/runs",
        )
    arguments, _ = await _described(request)
    session = await sessions.open(secrets.token_hex(16), arguments.pop("session", None) or {})
    session.hold()
    try:
        return await _run(request, session, arguments, Grant(), b"")
    finally:
        session.release()
        await sessions.close(session, "done")


async def run_in(
    request: web.BaseRequest, session: ServerSession, grant: Grant
) -> web.StreamResponse:
    """A run in a session that is open."""
    arguments, digest = await _described(request)
    return await _run(request, session, arguments, grant, digest)


async def _described(request: web.BaseRequest) -> tuple[dict[str, Any], bytes]:
    """The command: a JSON object with the arguments of ``run()``, or just its text; its digest."""
    body = await read_body(request, most=_MOST_COMMAND)
    is_json = request.content_type == "application/json"
    digest = hashlib.sha256(b"json" if is_json else b"text")
    digest.update(body)
    if is_json:
        return parse_json(body, max_bytes=_MOST_COMMAND), digest.digest()
    try:
        return {"cmd": body.decode()}, digest.digest()
    except UnicodeDecodeError as exc:
        raise WireError("the command is not text") from exc


def _number(request: web.BaseRequest, session: ServerSession, grant: Grant) -> tuple[int, bool]:
    """The number of the run, and whether the same request can find it again.

    It follows from the caller's key, the idempotency key and a secret of the session: no caller
    arrives at a run of another one.
    """
    found = request.headers.getall("Idempotency-Key", [])
    if not found:
        return secrets.randbits(63), False
    if len(found) > 1 or not 0 < len(found[0]) <= _MAX_KEY:
        raise SandboxUsageError(
            f"Idempotency-Key must be given once, with 1 to {_MAX_KEY} characters",
            argument="Idempotency-Key",
        )
    digest = hashlib.blake2b(key=session.secret, digest_size=8)
    for part in (grant.key, found[0]):
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(4) + data)
    return int.from_bytes(digest.digest()) >> 1, True


async def _run(
    request: web.BaseRequest,
    session: ServerSession,
    arguments: dict[str, Any],
    grant: Grant,
    digest: bytes,
) -> web.StreamResponse:
    number, has_key = _number(request, session, grant)
    run = session.runs.get(number)
    known = _known(request)
    if run is None:
        if known != Offsets():
            raise SandboxUsageError(
                "there is nothing to go on with: this run is not known (any more)",
                argument="Idempotency-Key",
                code="run-lost",
            )
        session.check_room(grant)
        run = session.launch(number, _spec(session, arguments), grant)
        run.request_digest = digest
        charge = request.pop("charge")
        run.over.add_done_callback(lambda _: charge.release())
    elif not hmac.compare_digest(run.request_digest, digest) or run.grant.key != grant.key:
        raise SandboxUsageError(
            "this Idempotency-Key was used for another request",
            argument="Idempotency-Key",
            code="key-reused",
            hint="use a new key for every command, and send the same body when you try again",
        )
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
    stream = _Lines(run, keep=_KEPT if has_key else 0)
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
        if not has_key:
            # It cannot be asked for again.
            run.end("closed")
            session.forget(run)
        elif not stream.is_superseded:
            session.detach(run, stream)
            if run.log.ended:
                session.keep(run)
    return response


def _known(request: web.BaseRequest) -> Offsets:
    try:
        query = parse_qs(request.rel_url.raw_query_string, max_num_fields=8)
    except ValueError as exc:
        raise WireError("the query has more than 8 fields") from exc
    texts = [query.get(name, ["0"])[-1] for name in ("stdout", "stderr")]
    if not all(_OFFSET.fullmatch(text) for text in texts):
        raise SandboxUsageError("stdout and stderr must be offsets: numbers from 0 on")
    return Offsets(*map(int, texts))


def _spec(session: ServerSession, arguments: dict[str, Any]) -> Any:
    if unknown := arguments.keys() - _RUN:
        raise SandboxUsageError(f"a run has no argument {min(unknown)!r}", argument=min(unknown))
    options = dict(arguments)
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
        self.is_superseded = False
        """The same request came again and has taken the run over."""

    def notify(self, _: ServerRun) -> None:
        self._wake.set()

    def superseded(self, _: ServerRun) -> None:
        self.is_superseded = True
        self._wake.set()

    async def lines(self) -> Any:
        log = self._run.log
        while True:
            await self._wake.wait()
            self._wake.clear()
            while log.has_more and not self.is_superseded:
                for line in self._next():
                    yield line
                    if self.is_superseded:
                        break
                else:
                    self._acknowledge()
            if self.is_superseded:
                yield _SUPERSEDED
                return
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
        # Events are few and small: with a key, all of them can be arguments again.
        events = self._run.log.events
        known = events.acked if self._keep else events.sent
        self._run.ack(Offsets(done.get(1, 0), done.get(2, 0), known))

    _end: bytes = b""


def _line(fd: int, offset: int, data: bytes) -> bytes:
    """Text where it is text; otherwise base64, so that nothing is lost."""
    arguments: dict[str, Any] = {"stream": _NAMES[fd], "offset": offset}
    try:
        arguments["text"] = data.decode()
    except UnicodeDecodeError:
        arguments["base64"] = base64.b64encode(data).decode()
    return json.dumps(arguments).encode() + b"\n"
