"""Runs over plain HTTP: one request, lines of JSON as the response, the exit in the last line.

A request with an ``Idempotency-Key`` can be repeated. It does not run a second time, but resumes at
the offsets in its query (``stdout=`` and ``stderr=``), as far back as output is kept.
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
from union.sandbox.server._http import HEADERS, is_private, read_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._server_session import ServerSession
    from union.sandbox.server._sessions import Sessions

__all__ = ["run_in", "run_once"]

_MAX_COMMAND_BYTES: Final = 16 * 1024 * 1024
_REPLAY_BYTES: Final = 512 * 1024
"""Output of a stream that is kept for a repeated request with an idempotency key."""
_MAX_KEY_CHARS: Final = 255
_OFFSET: Final = re.compile(r"[0-9]{1,18}")
_STREAM_NAMES: Final = {1: "stdout", 2: "stderr"}
_SUPERSEDED: Final = (
    encode_event(
        Failed(
            "transport",
            "the request was repeated on another connection, which continues the run",
            "superseded",
            "",
        )
    )
    + b"\n"
)
_RUN_ARGUMENTS: Final = frozenset(
    {
        "cmd", "script_type", "stdin", "env", "cwd", "network_mode", "network_allowlist",
        "timeout_s", "stdout", "stderr",
    }
)  # fmt: skip


async def run_once(request: web.BaseRequest, sessions: Sessions) -> web.StreamResponse:
    """Run a command in a session of its own, which ends with it."""
    if "Idempotency-Key" in request.headers:
        raise SandboxUsageError(
            "POST /v1/run does not accept an Idempotency-Key: its session ends with the run",
            argument="Idempotency-Key",
            hint="open a session and send the command to POST /v1/sessions/ID/runs",
        )
    arguments, _ = await _read_command(request)
    session = await sessions.open(
        secrets.token_hex(16), arguments.pop("session", None) or {}, is_private=is_private(request)
    )
    session.hold()
    try:
        return await _run(request, session, arguments, Grant(), b"")
    finally:
        session.release()
        await sessions.close(session, "done")


async def run_in(
    request: web.BaseRequest, session: ServerSession, grant: Grant
) -> web.StreamResponse:
    """Run a command in an open session."""
    arguments, digest = await _read_command(request)
    return await _run(request, session, arguments, grant, digest)


async def _read_command(request: web.BaseRequest) -> tuple[dict[str, Any], bytes]:
    """Return the arguments of ``run()`` and the digest of the body.

    The body is a JSON object with the arguments, or the text of a shell command.
    """
    body = await read_body(request, max_bytes=_MAX_COMMAND_BYTES)
    is_json = request.content_type == "application/json"
    digest = hashlib.sha256(b"json" if is_json else b"text")
    digest.update(body)
    if is_json:
        return parse_json(body, max_bytes=_MAX_COMMAND_BYTES), digest.digest()
    try:
        return {"cmd": body.decode()}, digest.digest()
    except UnicodeDecodeError as exc:
        raise WireError("the command must be UTF-8 text") from exc


def _run_number(request: web.BaseRequest, session: ServerSession, grant: Grant) -> tuple[int, bool]:
    """Return the number of the run, and whether a repeated request gets the same number.

    The number is derived from the caller's key, the idempotency key and a secret of the session, so
    that no caller can guess the number of another caller's run.
    """
    found = request.headers.getall("Idempotency-Key", [])
    if not found:
        return secrets.randbits(63), False
    if len(found) > 1 or not 0 < len(found[0]) <= _MAX_KEY_CHARS:
        raise SandboxUsageError(
            f"Idempotency-Key must be given once, with 1 to {_MAX_KEY_CHARS} characters; got "
            f"{len(found)} with {len(found[0])}",
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
    number, has_key = _run_number(request, session, grant)
    run = session.runs.get(number)
    known = _client_offsets(request)
    if run is None:
        if known != Offsets():
            raise SandboxUsageError(
                "cannot resume: the server has no run for this Idempotency-Key",
                argument="Idempotency-Key",
                code="run-lost",
                hint="send the request without offsets to run the command again",
            )
        session.check_room(grant)
        arguments = session.resolve_entries(arguments, grant, is_private=is_private(request))
        run = session.launch(number, _spec(session, arguments), grant)
        run.request_digest = digest
        charge = request.pop("charge")
        run.over.add_done_callback(lambda _: charge.release())
    elif not hmac.compare_digest(run.request_digest, digest) or run.grant.key != grant.key:
        raise SandboxUsageError(
            "this Idempotency-Key was used for a different request",
            argument="Idempotency-Key",
            code="key-reused",
            hint="use a new key for every command, and repeat a request with the same body",
        )
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
    stream = _LineListener(run, keep=_REPLAY_BYTES if has_key else 0)
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
            # The request cannot be repeated.
            run.end("closed")
            session.forget(run)
        elif not stream.is_superseded:
            session.detach(run, stream)
            if run.log.ended:
                session.keep(run)
    return response


def _client_offsets(request: web.BaseRequest) -> Offsets:
    try:
        query = parse_qs(request.rel_url.raw_query_string, max_num_fields=8)
    except ValueError as exc:
        raise WireError("the query must have at most 8 fields") from exc
    texts = [query.get(name, ["0"])[-1] for name in ("stdout", "stderr")]
    if not all(_OFFSET.fullmatch(text) for text in texts):
        raise SandboxUsageError(
            f"stdout and stderr must be offsets, whole numbers from 0, got {texts!r:.80}"
        )
    return Offsets(*map(int, texts))


def _spec(session: ServerSession, arguments: dict[str, Any]) -> Any:
    if unknown := arguments.keys() - _RUN_ARGUMENTS:
        raise SandboxUsageError(
            f"unknown argument {min(unknown)!r:.80}; accepted are "
            f"{', '.join(sorted(_RUN_ARGUMENTS))}",
            argument=min(unknown),
        )
    options = dict(arguments)
    cmd = options.pop("cmd", None)
    stdin = options.pop("stdin", None)
    for name in ("stdout", "stderr"):
        options[name] = PIPE if options.get(name, True) is not False else DEVNULL
    if stdin is not None and not isinstance(stdin, str):
        raise SandboxUsageError(
            f"stdin must be a string, got {type(stdin).__name__}", argument="stdin"
        )
    return resolve_run(
        session.spec, cmd, stdin=None if stdin is None else stdin.encode(), **options
    )


class _LineListener:
    """Turns the events and output of a run into lines of JSON; acknowledges what was sent."""

    def __init__(self, run: ServerRun, *, keep: int) -> None:
        self._run = run
        self._keep = keep
        self._wake = asyncio.Event()
        self.is_superseded = False
        """Whether a repeated request has taken the run over."""

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
                for line in self._next_lines():
                    yield line
                    if self.is_superseded:
                        break
                else:
                    self._acknowledge()
            if self.is_superseded:
                yield _SUPERSEDED
                return
            if log.ended and all(s.closed_sent for s in log.streams.values()):
                # The end is sent last, after all output.
                yield self._end + b"\n"
                return

    def _next_lines(self) -> Iterator[bytes]:
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
        # Events are few and small: for a repeated request all of them are kept.
        events = self._run.log.events
        known = events.acked if self._keep else events.sent
        self._run.ack(Offsets(done.get(1, 0), done.get(2, 0), known))

    _end: bytes = b""


def _line(fd: int, offset: int, data: bytes) -> bytes:
    """Return one line of output: as text if it is UTF-8, else as base64."""
    arguments: dict[str, Any] = {"stream": _STREAM_NAMES[fd], "offset": offset}
    try:
        arguments["text"] = data.decode()
    except UnicodeDecodeError:
        arguments["base64"] = base64.b64encode(data).decode()
    return json.dumps(arguments).encode() + b"\n"
