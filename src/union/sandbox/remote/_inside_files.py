"""RemoteInside: the file calls of machine mode, on a server."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, get_args

from union.sandbox._core.files import ChangeKind, FileChange
from union.sandbox._core.paths import visible_path
from union.sandbox._files.writer import as_byte_view, check_mode
from union.sandbox._wire.frames import WireError, parse_json
from union.sandbox._wire.values import decode_file
from union.sandbox.constants import MAX_DIR_ENTRIES
from union.sandbox.errors import SandboxConnectionError, SandboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.files import FileInfo
    from union.sandbox.remote._http import HttpClient

__all__ = ["RemoteInside", "decode_listing", "file_query"]

_LONG_S: Final = 600.0
_MAX_CHANGE_BYTES: Final = 64 * 1024
_NO_LIMIT: Final = 2**62


def file_query(mode: int, *, overwrite: bool) -> dict[str, str]:
    """Return the fields of a query that stores a file."""
    return {"mode": f"{mode:o}", "overwrite": str(int(overwrite))}


def decode_listing(payload: dict[str, Any], top: str, *, is_machine: bool) -> tuple[FileInfo, ...]:
    """Decode the entries of the directory ``top``; that of a machine may be any."""
    entries = payload["entries"]
    if not isinstance(entries, list) or len(entries) > MAX_DIR_ENTRIES:
        raise WireError(f"a listing must be a list of at most {MAX_DIR_ENTRIES} entries")
    found = tuple(decode_file(entry, is_machine=is_machine) for entry in entries)
    if is_machine:
        prefix = "" if top == "." else top.rstrip("/") + "/"
        for info in found:
            # A download creates files with these names, so none may be a path.
            if info.path != prefix + info.name or info.name in {"", ".", ".."}:
                raise WireError(f"no entry of the directory: {info.path!r:.100}")
    return found


class RemoteInside:
    """The InsideCalls of a session on a server.

    Args:
        http: the client of its server.
        session: its name there.
        work_dir: the directory inside that relative paths refer to.

    """

    def __init__(self, http: HttpClient, session: str, work_dir: str) -> None:
        self._http = http
        self._session = session
        self._resolve = functools.partial(visible_path, work_dir=work_dir)

    async def append(self, path: str, data: bytes, *, mode: int) -> int:
        check_mode(mode)
        view = as_byte_view(data)

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield bytes(view)

        return await self._http.store(
            self._session,
            self._resolve(path),
            pieces(),
            route="files/append",
            query=file_query(mode, overwrite=True),
        )

    async def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        where = self._resolve(target, argument="target")
        await self._call(
            "rename", {"path": self._resolve(source), "target": where, "overwrite": overwrite}
        )

    async def glob(self, pattern: str, *, hidden: bool) -> tuple[str, ...]:
        from union.sandbox.remote._http import MAX_LISTING

        checked = self._resolve(pattern, argument="pattern")
        payload = {"pattern": checked, "hidden": hidden}
        paths = (await self._call("glob", payload, max_bytes=MAX_LISTING)).get("paths")
        if (
            not isinstance(paths, list)
            or len(paths) > MAX_DIR_ENTRIES
            or not all(isinstance(path, str) for path in paths)
        ):
            raise self._invalid("a result of glob that is no list of paths")
        return tuple(paths)

    async def _call(self, action: str, payload: dict[str, Any], **limits: Any) -> dict[str, Any]:
        path = f"sessions/{self._session}/files/{action}"
        return await self._http.call("POST", path, payload, within_s=_LONG_S, **limits)

    async def watch(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChange | None, None]:
        pieces = self._http.fetch(
            self._session,
            self._resolve(path),
            max_bytes=_NO_LIMIT,
            route="files/watch",
            query={"recursive": str(int(recursive))},
        )
        try:
            async for piece in pieces:
                yield self._change(piece)
        finally:
            await pieces.aclose()

    def _change(self, piece: bytes) -> FileChange | None:
        try:
            payload = parse_json(piece, max_bytes=_MAX_CHANGE_BYTES)
        except WireError as exc:
            raise self._invalid("a change that is no JSON") from exc
        if not payload:
            return None
        path, kind = payload.get("path"), payload.get("kind")
        if not isinstance(path, str) or kind is None or kind not in get_args(ChangeKind):
            raise self._invalid("a change that is no path and kind")
        return FileChange(path=path, kind=kind)

    async def archive(
        self, path: str, *, exclude: tuple[str, ...], max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        pieces = self._http.fetch(
            self._session,
            self._resolve(path),
            max_bytes=max_bytes,
            route="files/archive",
            query={"exclude": "\0".join(exclude)},
        )
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def extract(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        return await self._http.store(
            self._session, self._resolve(path), chunks, route="files/extract", query={}
        )

    def _invalid(self, what: str) -> SandboxError:
        return SandboxConnectionError(
            f"{self._http.endpoint}: the server sent {what}",
            endpoint=str(self._http.endpoint),
            sent=True,
            code="protocol",
            hint="the server is faulty or hostile: do not use it",
        )
