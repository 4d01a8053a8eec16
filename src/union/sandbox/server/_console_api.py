"""The API of the console: the list of sessions, one session, the live output of a run.

It requires the server's token. No request here renews a lease: a session that the console shows
ends when its own client is gone, like any other.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import itertools
import json
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from union.sandbox._version import __version__
from union.sandbox.errors import SandboxExecutionError, SessionClosedError
from union.sandbox.server._http import HEADERS, json_response

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox.server._records import RunRecord
    from union.sandbox.server._server_session import ServerSession
    from union.sandbox.server._sessions import Sessions

__all__ = ["ConsoleApi"]

_MAX_FOLLOWERS: Final = 32
_POLL_INTERVAL_S: Final = 0.1
"""Shortest time between two updates; it bounds the cost of an observer."""
_KEEPALIVE_S: Final = 15.0
"""Time without output after which an empty line is sent, to keep the connection open."""
_WRITE_TIMEOUT_S: Final = 30.0
"""Longest time for an observer to read one update."""
_END_TIMEOUT_S: Final = 5.0
_MAX_DIFF_CHANGES: Final = 500
_MAX_DIFF_CHARS: Final = 512 * 1024
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_NAMES: Final = {1: "stdout", 2: "stderr"}


class ConsoleApi:
    """Serves the requests below ``/v1/console``; the caller has checked the token."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._followers = 0

    async def handle(self, request: web.BaseRequest, parts: list[str]) -> web.StreamResponse:
        """Return the response to a request; ``parts`` is the path after ``/v1/console``."""
        match request.method, parts:
            case "GET", []:
                return json_response(self._overview())
            case "GET", [name]:
                return json_response(_detail(self._sessions.get(name)))
            case "GET", [name, "diff", checkpoint]:
                return json_response(await _difference(self._sessions.get(name), checkpoint))
            case "GET", [name, "runs", number]:
                return await self._follow(request, self._record(name, number))
            case "DELETE", [name, "runs", number]:
                return json_response({"ended": await _end(self._record(name, number))})
        raise SessionClosedError(
            f"no such endpoint: {request.method} {request.path[:100]}", code="not-found"
        )

    def _record(self, name: str, number: str) -> RunRecord:
        runs = self._sessions.get(name).record.runs
        record = runs.get(int(number)) if _NUMBER.fullmatch(number) else None
        if record is None:
            raise SessionClosedError(
                f"no such run in this session: {number[:20]!r}",
                code="not-found",
                hint="of ended runs, only the latest are kept",
            )
        return record

    def _overview(self) -> dict[str, Any]:
        sessions, config = self._sessions, self._sessions.config
        return {
            "now": time.time(),
            "version": __version__,
            "started_at": sessions.metrics.started,
            "draining": sessions.draining,
            "max_sessions": config.max_sessions,
            "max_runs": config.max_runs,
            "sessions": [_summary(session) for session in sessions.all()],
        }

    async def _follow(self, request: web.BaseRequest, record: RunRecord) -> web.StreamResponse:
        if self._followers >= _MAX_FOLLOWERS:
            raise SandboxExecutionError(
                f"limit of observers reached ({_MAX_FOLLOWERS})",
                stage="transport",
                code="busy",
                hint="close a console page that is not needed",
            )
        headers = {**HEADERS, "Content-Type": "application/x-ndjson"}
        response = web.StreamResponse(headers=headers)
        self._followers += 1
        try:
            await response.prepare(request)
            async for lines in _lines(record):
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await response.write(lines)
            await response.write_eof()
        except TimeoutError:
            # The observer does not read; the client of the run is not affected.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._followers -= 1
        return response


async def _lines(record: RunRecord) -> Any:
    """Yield lines of JSON, from the kept output to the end of the run; count skipped bytes."""
    wake = asyncio.Event()
    wake.set()
    record.watchers.add(wake)
    decoders = {fd: _decoder() for fd in _NAMES}
    offset = shown = 0
    if record.code:
        yield _line({"code": record.code})
    try:
        while True:
            try:
                async with asyncio.timeout(_KEEPALIVE_S):
                    await wake.wait()
            except TimeoutError:
                yield b"\n"
                continue
            wake.clear()
            over = record.is_over
            skipped, pieces = record.tail.since(offset)
            begin, offset = offset + skipped, record.tail.end
            items, shown = record.shown[shown:], len(record.shown)
            if skipped:
                decoders = {fd: _decoder() for fd in _NAMES}
                yield _line({"skipped": skipped})
            if text := b"".join(_interleaved(begin, pieces, items, decoders)):
                yield text
            if over:
                yield _line({"end": json.loads(record.end or b"null")})
                return
            await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        record.watchers.discard(wake)


def _interleaved(
    begin: int,
    pieces: list[tuple[int, bytes]],
    items: list[tuple[int, dict[str, Any]]],
    decoders: dict[int, codecs.IncrementalDecoder],
) -> Iterator[bytes]:
    """Yield output that begins at offset ``begin``, and each item after the output before it."""
    rest = deque(pieces)
    for at, item in items:
        before: list[tuple[int, bytes]] = []
        while rest and begin < at:
            fd, data = rest.popleft()
            if begin + len(data) > at:
                rest.appendleft((fd, data[at - begin :]))
                data = data[: at - begin]
            before.append((fd, data))
            begin += len(data)
        yield from _texts(before, decoders)
        yield _line(item)
    yield from _texts(list(rest), decoders)


def _texts(
    pieces: list[tuple[int, bytes]], decoders: dict[int, codecs.IncrementalDecoder]
) -> Iterator[bytes]:
    for fd, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        if text := decoders[fd].decode(b"".join(data for _, data in group)):
            yield _line({"stream": _NAMES[fd], "text": text})


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _line(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload).encode() + b"\n"


async def _end(record: RunRecord) -> bool:
    """End a run as a timeout does; return whether it has ended."""
    if record.end_run is not None:
        wake = asyncio.Event()
        record.watchers.add(wake)
        record.end_run("operator")
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                while record.end is None:
                    await wake.wait()
                    wake.clear()
        except TimeoutError:
            return False
        finally:
            record.watchers.discard(wake)
    return record.end is not None


async def _difference(session: ServerSession, checkpoint: str) -> dict[str, Any]:
    """Return what has changed since a checkpoint, as much as a page shows."""
    session.hold()
    try:
        with session.operations.comparing():
            changes = await session.checkpoint_calls.diff(checkpoint, content=True)
    finally:
        session.release()
    shown: list[dict[str, Any]] = []
    room = _MAX_DIFF_CHARS
    for change in changes[:_MAX_DIFF_CHANGES]:
        text = change.text if change.text is not None and len(change.text) <= room else None
        room -= len(text or "")
        path = change.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        shown.append({"path": path, "action": change.action, "size": change.size, "text": text})
    return {"total": len(changes), "changes": shown}


def _summary(session: ServerSession) -> dict[str, Any]:
    record = session.record
    return {
        **session.summary(),
        "lease_s": session.lease_s,
        "grace_s": session.grace_s,
        "runs": record.count,
        "running": record.running,
        "cpu_s": round(record.cpu_s, 3),
        "peak_bytes": record.peak_bytes,
    }


def _detail(session: ServerSession) -> dict[str, Any]:
    network, record = session.spec.network, session.record
    return {
        "now": time.time(),
        **_summary(session),
        "timeout_s": session.spec.timeout_s,
        "limits": dataclasses.asdict(session.spec.limits),
        "network_allowlist": [entry.text for entry in network.allow],
        "network_denylist": [entry.text for entry in network.deny],
        "isolation": session.transport.isolation.to_dict(),
        "fs_allowlist": {k: list(v) for k, v in session.transport.fs_allowlist().items()},
        "recorded": [run.described() for run in record.runs.values()],
        "decisions": [
            {"number": number, "run": run, **dataclasses.asdict(decision)}
            for number, run, decision in record.decisions
        ],
        "checkpoints": [
            {"time": at, "action": action, "id": checkpoint, "name": name}
            for at, action, checkpoint, name in record.checkpoints
        ],
        "requests": [
            {"number": number, "run": run, **dataclasses.asdict(request)}
            for number, run, request in record.requests
        ],
    }
