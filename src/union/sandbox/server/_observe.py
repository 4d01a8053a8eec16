"""What the console asks for: all sessions, one of them, the output of a run as it comes.

For whoever has the token, and only to look: no request here holds a lease, so a session that is
watched ends when its client is gone, like any other.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import itertools
import json
import re
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from union.sandbox._version import __version__
from union.sandbox._wire.frames import to_json
from union.sandbox.errors import SandboxExecutionError, SessionClosedError
from union.sandbox.server._bodies import HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox.server._records import RunRecord
    from union.sandbox.server._sessions import ServerSession, Sessions

__all__ = ["Observatory"]

_MOST_WATCHERS: Final = 32
_PAUSE_S: Final = 0.1
"""Between two looks: what an observer costs has an upper bound, however much is written."""
_QUIET_S: Final = 15.0
"""After which an empty line says that the connection still stands."""
_STUCK_S: Final = 30.0
"""How long an observer may take to read what it was sent."""
_END_S: Final = 5.0
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_NAMES: Final = {1: "stdout", 2: "stderr"}


class Observatory:
    """Answers the requests below ``/v1/console``; the caller has seen to it that they may be."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._watching = 0

    async def handle(self, request: web.BaseRequest, parts: list[str]) -> web.StreamResponse:
        """``parts`` is the path behind ``/v1/console``."""
        match request.method, parts:
            case "GET", []:
                return _answer(self._overview())
            case "GET", [name]:
                return _answer(_detail(self._sessions.get(name)))
            case "GET", [name, "runs", number]:
                return await self._follow(request, self._record(name, number))
            case "DELETE", [name, "runs", number]:
                return _answer({"ended": await _end(self._record(name, number))})
        raise SessionClosedError(
            f"there is no {request.method} {request.path[:100]}", code="not-found"
        )

    def _record(self, name: str, number: str) -> RunRecord:
        runs = self._sessions.get(name).record.runs
        record = runs.get(int(number)) if _NUMBER.fullmatch(number) else None
        if record is None:
            raise SessionClosedError(
                "there is no such run (any more)",
                code="not-found",
                hint="of runs that have ended, the latest are remembered",
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
        if self._watching >= _MOST_WATCHERS:
            raise SandboxExecutionError(
                f"{self._watching} observers follow a run already, as many as may",
                stage="transport",
                code="busy",
                hint="close a page that you do not need",
            )
        headers = {**HEADERS, "Content-Type": "application/x-ndjson"}
        response = web.StreamResponse(headers=headers)
        self._watching += 1
        try:
            await response.prepare(request)
            async for lines in _lines(record):
                async with asyncio.timeout(_STUCK_S):
                    await response.write(lines)
            await response.write_eof()
        except TimeoutError:
            # Somebody who does not read. The client of the run has not noticed, and will not.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watching -= 1
        return response


async def _lines(record: RunRecord) -> Any:
    """Lines of JSON, from what is remembered to the end of the run; what was missed is counted."""
    wake = asyncio.Event()
    wake.set()
    record.watchers.add(wake)
    decoders = {fd: _decoder() for fd in _NAMES}
    offset = 0
    try:
        while True:
            try:
                async with asyncio.timeout(_QUIET_S):
                    await wake.wait()
            except TimeoutError:
                yield b"\n"
                continue
            wake.clear()
            over = record.is_over
            skipped, pieces = record.tail.since(offset)
            offset = record.tail.end
            if skipped:
                decoders = {fd: _decoder() for fd in _NAMES}
                yield _line({"skipped": skipped})
            if text := b"".join(_texts(pieces, decoders)):
                yield text
            if over:
                yield _line({"end": json.loads(record.end or b"null")})
                return
            await asyncio.sleep(_PAUSE_S)
    finally:
        record.watchers.discard(wake)


def _texts(
    pieces: list[tuple[int, bytes]], decoders: dict[int, codecs.IncrementalDecoder]
) -> Iterator[bytes]:
    for fd, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        if text := decoders[fd].decode(b"".join(data for _, data in group)):
            yield _line({"stream": _NAMES[fd], "text": text})


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _answer(told: dict[str, Any]) -> web.Response:
    body = to_json(told) + b"\n"
    return web.Response(body=body, content_type="application/json", headers=HEADERS)


async def _end(record: RunRecord) -> bool:
    """Ends a run as a time limit would; True when it has ended."""
    if record.end_run is not None:
        wake = asyncio.Event()
        record.watchers.add(wake)
        record.end_run("operator")
        try:
            async with asyncio.timeout(_END_S):
                while record.end is None:
                    await wake.wait()
                    wake.clear()
        except TimeoutError:
            return False
        finally:
            record.watchers.discard(wake)
    return record.end is not None


def _summary(session: ServerSession) -> dict[str, Any]:
    record = session.record
    return {
        "session": session.name,
        "backend": session.spec.backend,
        "opened_at": session.opened_at,
        "work_dir": session.transport.work_dir,
        "host_dir": session.transport.host_dir,
        "network_mode": session.spec.network.mode,
        "connections": len(session.listeners),
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
    }
