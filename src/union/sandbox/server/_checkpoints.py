"""Checkpoints of a session over HTTP.

A call that changes something has a key, chosen by the client: if the connection drops, the client
sends the call again with the same key, and receives the outcome of the first one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._checkpoints.values import check_name
from union.sandbox._checkpoints.wire import MAX_DIFF, encode_changes, encode_checkpoint
from union.sandbox._wire.frames import WireError
from union.sandbox.errors import PolicyError, SandboxError, SandboxUsageError
from union.sandbox.server import _files
from union.sandbox.server._http import json_response, read_json

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
    )

    from aiohttp import web

    from union.sandbox._checkpoints.values import TreeChange
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._server_session import ServerSession

__all__ = ["ACTIONS", "handle"]

ACTIONS: Final = frozenset(
    {
        ("GET", "checkpoints/diff"),
        ("GET", "checkpoints/export"),
        ("POST", "checkpoints/adopt"),
        ("POST", "checkpoints/drop"),
        ("POST", "checkpoints/list"),
        ("POST", "checkpoints/rollback"),
        ("POST", "checkpoints/take"),
        ("PUT", "checkpoints/import"),
    }
)
_FIELDS: Final = {
    "checkpoints/adopt": {"key", "session"},
    "checkpoints/drop": {"key", "checkpoint"},
    "checkpoints/list": set[str](),
    "checkpoints/rollback": {"key", "checkpoint", "contexts"},
    "checkpoints/take": {"key", "name"},
}
_KEY: Final = re.compile(r"[0-9a-f]{32}")


async def handle(
    request: web.BaseRequest,
    action: str,
    session: ServerSession,
    grant: Grant,
    find: Callable[[str], ServerSession],
) -> web.StreamResponse:
    """Perform one of ``ACTIONS``.

    Args:
        request: the request.
        action: its path below the session.
        session: the session.
        grant: the rights of the caller.
        find: returns another session of the server by its name.

    """
    if not grant.may_checkpoint:
        raise PolicyError(
            "this token does not permit checkpoints",
            code="checkpoints-not-permitted",
            hint="request the capability with 'checkpoints': true, or use the token of the server",
        )
    calls = session.checkpoint_calls
    if action == "checkpoints/diff":
        query = _files.query_of(request)
        checkpoint, content = _text(query, "checkpoint"), query.get("content") == "1"
        with session.operations.comparing():
            changes = await calls.diff(checkpoint, content=content)
            return await _files.send(request, _pieces(changes), framed=True)
    if action == "checkpoints/export":
        checkpoint = _text(_files.query_of(request), "checkpoint")
        chunks = _closable(calls.export_checkpoint(checkpoint))
        return await _files.send(request, chunks, framed=True)
    if action == "checkpoints/import":
        return await _import(request, session)
    payload = _checked_fields(action, await read_json(request))
    if action == "checkpoints/list":
        found = await calls.checkpoints()
        return json_response({"checkpoints": list(map(encode_checkpoint, found)), **_made(session)})
    if action == "checkpoints/adopt" and not grant.is_full:
        raise PolicyError(
            "this token permits its own session only", hint="use the token of the server"
        )

    async def perform() -> dict[str, Any]:
        if action == "checkpoints/take":
            info = await calls.checkpoint(check_name(payload["name"]))
            session.record.checkpoint("checkpoint", info.id, info.name)
            return {**encode_checkpoint(info), **_made(session)}
        if action == "checkpoints/adopt":
            other = find(payload["session"])
            other.hold()
            try:
                info = await calls.adopt(other.transport)
            finally:
                other.release()
            session.record.checkpoint("adopt", info.id, info.name)
            return {**encode_checkpoint(info), **_made(session)}
        if action == "checkpoints/rollback":
            keeps = payload["contexts"] == "keep"
            await calls.rollback(payload["checkpoint"], keeps_contexts=keeps)
            session.record.checkpoint("rollback", payload["checkpoint"], "")
        else:
            await calls.drop_checkpoint(payload["checkpoint"])
            session.record.checkpoint("drop", payload["checkpoint"], "")
        return {"done": True, **_made(session)}

    return json_response(await session.operations.perform(grant, action, payload["key"], perform))


async def _import(request: web.BaseRequest, session: ServerSession) -> web.StreamResponse:
    query = _files.query_of(request)
    name = check_name(query.get("name", ""))
    size = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal size
        async for piece in _files.framed_body(request):
            size += len(piece)
            yield piece

    try:
        info = await session.checkpoint_calls.import_checkpoint(name, counted())
    except SandboxError:
        await _files.discard(request)
        raise
    session.record.checkpoint("import", info.id, info.name)
    return json_response({**encode_checkpoint(info), "size": size, **_made(session)})


def _made(session: ServerSession) -> dict[str, Any]:
    return {"layers": session.transport.layers}


def _text(query: dict[str, str], name: str) -> str:
    if name not in query:
        raise SandboxUsageError(f"{name} is missing in the query", argument=name)
    return query[name]


def _checked_fields(action: str, payload: dict[str, Any]) -> dict[str, str]:
    if action == "checkpoints/rollback":
        payload = {"contexts": "end", **payload}
    if payload.keys() != _FIELDS[action] or not all(isinstance(v, str) for v in payload.values()):
        fields = ", ".join(sorted(_FIELDS[action])) or "no fields"
        raise WireError(f"{action} requires texts: {fields}")
    if "key" in payload and not _KEY.fullmatch(payload["key"]):
        raise WireError("key must be 32 hexadecimal digits")
    if payload.get("contexts", "end") not in {"keep", "end"}:
        raise WireError("contexts must be keep or end")
    return payload


async def _pieces(changes: tuple[TreeChange, ...]) -> AsyncGenerator[bytes, None]:
    size = 0
    for piece in encode_changes(changes):
        size += len(piece)
        if size > MAX_DIFF:
            raise SandboxUsageError(
                f"the difference has more than {MAX_DIFF} bytes",
                code="too-large",
                hint="compare without content=True",
            )
        yield piece


async def _closable(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        aclose = getattr(chunks, "aclose", None)
        if aclose is not None:
            await aclose()
