"""Files of a session over HTTP: streamed in both directions, with the outcome in the body."""

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
from union.sandbox.server._http import HEADERS, json_response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

    from aiohttp import StreamReader

    from union.sandbox._session.transport import Transport

__all__ = [
    "call",
    "discard",
    "fetch",
    "framed_body",
    "number_of",
    "path_of",
    "query_of",
    "send",
    "store",
]

_SIZE: Final = struct.Struct(">I")
_END_MARK: Final = 0xFFFFFFFF
_IDLE_TIMEOUT_S: Final = 60.0
_MAX_PIECE: Final = 1024 * 1024
_MAX_DISCARDED: Final = 64 * 1024 * 1024
_DISCARD_TIMEOUT_S: Final = 10.0
_MAX_OUTCOME: Final = 4096
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")


def query_of(request: web.BaseRequest) -> dict[str, str]:
    """Return the query; names that are not UTF-8 are kept as surrogate escapes."""
    try:
        found = parse_qs(
            request.rel_url.raw_query_string,
            keep_blank_values=True,
            errors="surrogateescape",
            max_num_fields=16,
        )
    except ValueError as exc:
        raise WireError("the query must have at most 16 fields") from exc
    return {name: values[-1] for name, values in found.items()}


def number_of(query: dict[str, str], name: str, default: int, base: int = 10) -> int:
    """Return a number of a query."""
    text = query.get(name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise SandboxUsageError(f"{name} must be a whole number, got {text[:40]!r}", argument=name)
    try:
        return int(text, base)
    except ValueError:
        raise SandboxUsageError(
            f"{name} must be a number of base {base}, got {text!r}", argument=name
        ) from None


def path_of(query: dict[str, str]) -> str:
    """Return the path that a query names."""
    if "path" not in query:
        raise SandboxUsageError("the query must have a field path", argument="path")
    return query["path"]


async def fetch(request: web.BaseRequest, transport: Transport) -> web.StreamResponse:
    """Send a file (GET): as it is or, with ``framed=1``, in pieces followed by the outcome."""
    query = query_of(request)
    max_bytes = number_of(query, "max_bytes", constants.MAX_FILE_BYTES)
    pieces = transport.read(path_of(query), max_bytes=max_bytes)
    return await send(request, pieces, framed=query.get("framed") == "1")


async def send(
    request: web.BaseRequest, pieces: AsyncGenerator[bytes, None], *, framed: bool
) -> web.StreamResponse:
    """Send pieces as they come; framed ones are followed by the outcome."""
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/octet-stream"})
    try:
        # Most errors occur with the first piece, before the response has begun.
        first = await anext(pieces, b"")
        await response.prepare(request)
        if first:
            await _write(response, first, framed=framed)
        try:
            async for piece in pieces:
                await _write(response, piece, framed=framed)
        except SandboxError as exc:
            if not framed:
                # Only an aborted connection can still report that the body is incomplete.
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
        await response.write(_SIZE.pack(len(piece)))
    await response.write(piece)


async def _finish(response: web.StreamResponse, payload: dict[str, Any]) -> None:
    await response.write(_SIZE.pack(_END_MARK) + to_json(payload))


async def store(request: web.BaseRequest, transport: Transport) -> web.Response:
    """Store the body as a file (PUT), completely or not at all."""
    query = query_of(request)
    overwrite = query.get("overwrite", "1")
    if overwrite not in {"0", "1"}:
        raise SandboxUsageError(
            f"overwrite must be 0 or 1, got {overwrite[:40]!r}", argument="overwrite"
        )
    body = framed_body(request) if query.get("framed") == "1" else _plain_body(request)
    try:
        size = await transport.write(
            path_of(query),
            body,
            mode=number_of(query, "mode", 0o644, base=8),
            overwrite=overwrite == "1",
        )
    except SandboxError:
        # A client that is still sending may lose the response, so the rest is read first.
        await discard(request)
        raise
    return json_response({"size": size})


async def discard(request: web.BaseRequest) -> None:
    """Read the rest of a body, within limits."""
    left = _MAX_DISCARDED
    try:
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            while left > 0 and (data := await request.content.readany()):
                left -= len(data)
    except TimeoutError:
        return  # The connection is closed after the response.


async def _in_time(reading: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(_IDLE_TIMEOUT_S):
            return await reading
    except TimeoutError as exc:
        raise SandboxUsageError(
            f"no data of the request body for {_IDLE_TIMEOUT_S:g} s", code="too-slow"
        ) from exc
    except asyncio.IncompleteReadError as exc:
        raise SandboxUsageError("the request body is incomplete", code="cut-off") from exc


async def _read_outcome(content: StreamReader) -> bytes:
    """Return the small JSON object that follows the last piece."""
    data = b""
    while piece := await content.readany():
        data += piece
        if len(data) > _MAX_OUTCOME:
            raise WireError(
                f"at most {_MAX_OUTCOME} bytes may follow the last piece, got {len(data)}"
            )
    return data


async def framed_body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Yield the pieces of a framed body; the client ends it with an outcome."""
    content = request.content
    while True:
        (size,) = _SIZE.unpack(await _in_time(content.readexactly(_SIZE.size)))
        if size == _END_MARK:
            break
        if size > _MAX_PIECE:
            raise WireError(f"a piece must have at most {_MAX_PIECE} bytes, got {size}")
        yield await _in_time(content.readexactly(size))
    if parse_json(await _in_time(_read_outcome(content))) != {"done": True}:
        raise SandboxUsageError("the client cancelled the upload", code="given-up")


async def _plain_body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; raise if it stops or is incomplete."""
    expected, size = request.content_length, 0
    while True:
        data = await _in_time(request.content.readany())
        if not data:
            break
        size += len(data)
        yield data
    if expected is not None and size != expected:
        raise SandboxUsageError(
            f"the request body has {size} bytes, expected {expected}", code="cut-off"
        )


async def call(action: str, payload: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """Perform an action without file content: list, stat, make a directory, remove."""
    known = {
        "files/list": {"path"},
        "files/stat": {"path"},
        "files/mkdir": {"path", "parents", "exist_ok"},
        "files/remove": {"path", "recursive"},
    }[action]
    if payload.keys() - known or not isinstance(path := payload.get("path"), str):
        raise WireError(f"{action} accepts the fields {', '.join(sorted(known))}; path is required")
    flags = {name: payload.get(name, False) for name in known - {"path"}}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise WireError(f"{', '.join(sorted(flags))} must be true or false")
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
