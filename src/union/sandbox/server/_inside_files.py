"""File calls of machine mode over HTTP: the same rights and frames as other file calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from union.sandbox import constants
from union.sandbox._wire.frames import WireError, to_json
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.server import _files
from union.sandbox.server._http import json_response, read_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp import web

    from union.sandbox._core.files import FileChange
    from union.sandbox._files.inside import InsideFiles
    from union.sandbox.on_device._transport import LocalTransport

__all__ = ["ACTIONS", "handle"]

ACTIONS: Final = frozenset(
    {
        ("GET", "files/archive"),
        ("GET", "files/watch"),
        ("POST", "files/glob"),
        ("POST", "files/rename"),
        ("PUT", "files/append"),
        ("PUT", "files/extract"),
    }
)
_SIGN_OF_LIFE_S: Final = 10.0
"""A watch without changes sends an empty piece this often, so that its client waits on."""
_MAX_EXCLUDED: Final = 1000


async def handle(
    request: web.BaseRequest, action: str, transport: LocalTransport
) -> web.StreamResponse:
    """Perform one of ``ACTIONS``."""
    inside = await transport.connect_inside()
    if inside is None:
        raise SandboxUsageError(
            "this call needs a session with persist='machine'",
            code="needs-machine",
            hint="open the session with persist='machine', or run a command",
        )
    match action:
        case "files/archive":
            return await _archive(request, inside)
        case "files/watch":
            return await _watch(request, inside)
        case "files/glob" | "files/rename":
            return json_response(await _call(action, await read_json(request), inside))
        case _:
            return await _store(request, action, inside)


async def _call(action: str, payload: dict[str, Any], inside: InsideFiles) -> dict[str, Any]:
    texts, flag = {
        "files/glob": (("pattern",), "hidden"),
        "files/rename": (("path", "target"), "overwrite"),
    }[action]
    is_set = payload.get(flag, False)
    if payload.keys() - {*texts, flag} or not isinstance(is_set, bool):
        raise WireError(f"{action} accepts the fields {', '.join(texts)} and the flag {flag}")
    values = [payload.get(name) for name in texts]
    if not all(isinstance(value, str) for value in values):
        raise WireError(f"{', '.join(texts)} must be texts")
    if action == "files/glob":
        return {"paths": list(await inside.glob(str(values[0]), hidden=is_set))}
    await inside.rename(str(values[0]), str(values[1]), overwrite=is_set)
    return {"done": True}


async def _store(request: web.BaseRequest, action: str, inside: InsideFiles) -> web.Response:
    query = _files.query_of(request)
    path, body = _files.path_of(query), _files.framed_body(request)
    size = 0
    try:
        if action == "files/extract":
            size = await inside.extract(path, body)
        else:
            mode = _files.number_of(query, "mode", 0o644, base=8)
            size = await inside.append(path, b"", mode=mode)
            async for piece in body:
                size = await inside.append(path, piece, mode=mode)
    except SandboxError:
        # A client that is still sending may lose the response, so the rest is read first.
        await _files.discard(request)
        raise
    return json_response({"size": size})


async def _archive(request: web.BaseRequest, inside: InsideFiles) -> web.StreamResponse:
    query = _files.query_of(request)
    exclude = tuple(filter(None, query.get("exclude", "").split("\0")))
    if len(exclude) > _MAX_EXCLUDED:
        raise SandboxUsageError(
            f"exclude must have at most {_MAX_EXCLUDED} paths", argument="exclude"
        )
    pieces = inside.archive(
        _files.path_of(query),
        exclude=exclude,
        max_bytes=_files.number_of(query, "max_bytes", constants.MAX_FILE_BYTES),
    )
    return await _files.send(request, pieces, framed=query.get("framed") == "1")


async def _watch(request: web.BaseRequest, inside: InsideFiles) -> web.StreamResponse:
    query = _files.query_of(request)
    changes = inside.watch(_files.path_of(query), recursive=query.get("recursive") == "1")
    return await _files.send(request, _lines(changes), framed=True)


async def _lines(changes: AsyncGenerator[FileChange | None, None]) -> AsyncGenerator[bytes, None]:
    """Yield each change as a JSON object; ``{}`` when the watch has begun, and while it waits."""
    following: asyncio.Task[FileChange | None] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.create_task(_next(changes))
            await asyncio.wait([following], timeout=_SIGN_OF_LIFE_S)
            if not following.done():
                yield to_json({})
                continue
            change = following.result()
            following = None
            yield to_json({} if change is None else {"path": change.path, "kind": change.kind})
    except StopAsyncIteration:
        return
    finally:
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await following
        await changes.aclose()


async def _next(changes: AsyncGenerator[FileChange | None, None]) -> FileChange | None:
    return await anext(changes)
