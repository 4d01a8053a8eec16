"""Files of a session over HTTP: streamed both ways, any size, with the end told in the body."""

from __future__ import annotations

import asyncio
import re
import struct
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from aiohttp import web

from union.sandbox import constants
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import WireError, parse_json, to_json
from union.sandbox._wire.values import encode_file
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.server._bodies import HEADERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from aiohttp import StreamReader

    from union.sandbox._session.transport import Transport

__all__ = ["call", "fetch", "store"]

_PIECE: Final = struct.Struct(">I")
_LAST: Final = 0xFFFFFFFF
_IDLE_S: Final = 60.0
_READ: Final = 1024 * 1024
_MOST_DISCARDED: Final = 64 * 1024 * 1024
_DISCARD_S: Final = 10.0
_MAX_OUTCOME: Final = 4096
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")


def _query(request: web.BaseRequest) -> dict[str, str]:
    """The query; a name that is not UTF-8 comes through as it is."""
    try:
        found = parse_qs(
            request.rel_url.raw_query_string,
            keep_blank_values=True,
            errors="surrogateescape",
            max_num_fields=16,
        )
    except ValueError as exc:
        raise WireError("the query has more than 16 fields") from exc
    return {name: values[-1] for name, values in found.items()}


def _number(query: dict[str, str], name: str, default: int, base: int = 10) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise SandboxUsageError(f"{name} must be a number, not {text[:40]!r}", argument=name)
    try:
        return int(text, base)
    except ValueError:
        raise SandboxUsageError(f"{name} must be a number, not {text!r}", argument=name) from None


def _path(query: dict[str, str]) -> str:
    if "path" not in query:
        raise SandboxUsageError("the query must name a path", argument="path")
    return query["path"]


async def fetch(request: web.BaseRequest, transport: Transport) -> web.StreamResponse:
    """GET: the content, as it is or, with ``framed=1``, in pieces with the outcome behind them."""
    query = _query(request)
    most = _number(query, "max_bytes", constants.MAX_FILE_BYTES)
    framed = query.get("framed") == "1"
    pieces = transport.read(_path(query), max_bytes=most)
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/octet-stream"})
    try:
        # Before anything is answered: most of what can be wrong shows here.
        first = await anext(pieces, b"")
        await response.prepare(request)
        if first:
            await _write(response, first, framed=framed)
        try:
            async for piece in pieces:
                await _write(response, piece, framed=framed)
        except SandboxError as exc:
            if not framed:
                # A body that is cut off is the one way left to say that it is not whole.
                if request.transport is not None:
                    request.transport.abort()
                return response
            await _finish(response, {"error": encode_error(exc)})
        else:
            if framed:
                await _finish(response, {"done": True})
        await response.write_eof()
    finally:
        await pieces.aclose()
    return response


async def _write(response: web.StreamResponse, piece: bytes, *, framed: bool) -> None:
    if framed:
        await response.write(_PIECE.pack(len(piece)))
    await response.write(piece)


async def _finish(response: web.StreamResponse, told: dict[str, Any]) -> None:
    await response.write(_PIECE.pack(_LAST) + to_json(told))


async def store(request: web.BaseRequest, transport: Transport) -> web.Response:
    """PUT: the body becomes the file, whole or not at all."""
    query = _query(request)
    overwrite = query.get("overwrite", "1")
    if overwrite not in {"0", "1"}:
        raise SandboxUsageError("overwrite must be 0 or 1", argument="overwrite")
    body = _framed(request) if query.get("framed") == "1" else _body(request)
    try:
        size = await transport.write(
            _path(query),
            body,
            mode=_number(query, "mode", 0o644, base=8),
            overwrite=overwrite == "1",
        )
    except SandboxError:
        # An answer that comes while the client still sends may be lost to it.
        await _discard(request)
        raise
    return web.Response(
        body=to_json({"size": size}) + b"\n", content_type="application/json", headers=HEADERS
    )


async def _discard(request: web.BaseRequest) -> None:
    left = _MOST_DISCARDED
    try:
        async with asyncio.timeout(_DISCARD_S):
            while left > 0 and (data := await request.content.readany()):
                left -= len(data)
    except TimeoutError:
        return  # then the connection is closed behind the answer


async def _soon(reading: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(_IDLE_S):
            return await reading
    except TimeoutError as exc:
        raise SandboxUsageError("the body took too long", code="too-slow") from exc
    except asyncio.IncompleteReadError as exc:
        raise SandboxUsageError("the body was cut off", code="cut-off") from exc


async def _rest(content: StreamReader) -> bytes:
    """What follows the last piece: a small JSON object."""
    data = b""
    while piece := await content.readany():
        data += piece
        if len(data) > _MAX_OUTCOME:
            raise WireError(f"more than {_MAX_OUTCOME} bytes follow the last piece")
    return data


async def _framed(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Pieces with their sizes; the client says at the end whether it was all, or is given up."""
    content = request.content
    while True:
        (size,) = _PIECE.unpack(await _soon(content.readexactly(_PIECE.size)))
        if size == _LAST:
            break
        if size > _READ:
            raise WireError(f"a piece of {size} bytes; at most {_READ} are accepted")
        yield await _soon(content.readexactly(size))
    if parse_json(await _soon(_rest(content))) != {"done": True}:
        raise SandboxUsageError("the client gave it up", code="given-up")


async def _body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The body as it comes; one that does not come any more, or not whole, is an error."""
    expected, size = request.content_length, 0
    while True:
        data = await _soon(request.content.readany())
        if not data:
            break
        size += len(data)
        yield data
    if expected is not None and size != expected:
        raise SandboxUsageError(f"{size} of {expected} bytes came", code="cut-off")


async def call(action: str, told: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """What has no body: listing, looking, making a directory, removing."""
    known = {
        "files/list": {"path"},
        "files/stat": {"path"},
        "files/mkdir": {"path", "parents", "exist_ok"},
        "files/remove": {"path", "recursive"},
    }[action]
    if told.keys() - known or not isinstance(path := told.get("path"), str):
        raise WireError(f"{action} takes {', '.join(sorted(known))}")
    flags = {name: told.get(name, False) for name in known - {"path"}}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise WireError("a flag that is neither true nor false")
    match action:
        case "files/list":
            return {"entries": [encode_file(info) for info in await transport.list_dir(path)]}
        case "files/stat":
            return encode_file(await transport.stat(path))
        case "files/mkdir":
            await transport.make_dir(path, **flags)
        case _:
            await transport.remove(path, **flags)
    return {"done": True}
