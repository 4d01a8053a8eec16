"""Calls about the files and processes of a session on a server: one HTTP request each."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, TypeVar

from union.sandbox._core.paths import visible_path, work_path
from union.sandbox._files.writer import as_byte_view, check_mode
from union.sandbox._wire.process_values import decode_processes
from union.sandbox._wire.values import decode_file
from union.sandbox.remote._inside_files import RemoteInside, decode_listing, file_query

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._wire.values import SessionInfo
    from union.sandbox.remote._http import HttpClient

__all__ = ["HttpCalls"]

_T = TypeVar("_T")
_PIECE: Final = 256 * 1024
_REMOVE_S: Final = 300.0
"""How long a server may take to remove a tree."""


class HttpCalls(abc.ABC):
    """The part of ``RemoteTransport`` that needs no connection for runs."""

    name: str

    @property
    @abc.abstractmethod
    def _required_info(self) -> SessionInfo: ...

    @property
    @abc.abstractmethod
    def work_dir(self) -> str: ...

    @abc.abstractmethod
    async def connected_http(self) -> HttpClient: ...

    @abc.abstractmethod
    def path(self, rest: str = "") -> str: ...

    @abc.abstractmethod
    def decode(self, decode: Callable[[Any], _T], value: object) -> _T: ...

    # Processes.

    async def processes(self) -> tuple[ProcessInfo, ...]:
        from union.sandbox.remote._http import MAX_LISTING

        http = await self.connected_http()
        path = self.path("/processes/list")
        payload = await http.call("POST", path, {}, max_bytes=MAX_LISTING)
        return self.decode(decode_processes, payload)

    async def stop_process(self, pid: int) -> bool:
        http = await self.connected_http()
        payload = await http.call("POST", self.path("/processes/stop"), {"pid": pid})
        return payload.get("existed") is True

    # Files.

    @property
    def is_machine(self) -> bool:
        """Whether file calls accept every path that is visible inside."""
        return self._required_info.is_machine

    async def connect_inside(self) -> RemoteInside | None:
        """Return the file calls of a machine; None if the session is none."""
        http = await self.connected_http()
        return RemoteInside(http, self.name, self.work_dir) if self.is_machine else None

    def _work_path(self, path: str, *, allow_root: bool = False) -> str:
        if self.is_machine:
            return visible_path(path, work_dir=self.work_dir)
        return work_path(path, work_dir=self.work_dir, allow_root=allow_root)

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        check_mode(mode)
        view = as_byte_view(data)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(view), _PIECE):
                yield bytes(view[at : at + _PIECE])

        return await self.write(path, pieces(), mode=mode, overwrite=overwrite)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        pieces = [piece async for piece in self.read(path, max_bytes=max_bytes)]
        return b"".join(pieces)

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        check_mode(mode)
        http = await self.connected_http()
        return await http.store(
            self.name, self._work_path(path), chunks, query=file_query(mode, overwrite=overwrite)
        )

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        http = await self.connected_http()
        pieces = http.fetch(self.name, self._work_path(path), max_bytes=max_bytes)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        from union.sandbox.remote._http import MAX_LISTING

        payload = await self._file_call("list", path, max_bytes=MAX_LISTING)
        top = self._work_path(path, allow_root=True)
        return self.decode(lambda p: decode_listing(p, top, is_machine=self.is_machine), payload)

    async def stat(self, path: str) -> FileInfo:
        payload = await self._file_call("stat", path)
        return self.decode(lambda p: decode_file(p, is_machine=self.is_machine), payload)

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        await self._file_call("mkdir", path, parents=parents, exist_ok=exist_ok)

    async def remove(self, path: str, *, recursive: bool) -> None:
        await self._file_call("remove", path, recursive=recursive)

    async def _file_call(
        self, action: str, path: str, *, max_bytes: int | None = None, **options: Any
    ) -> dict[str, Any]:
        http = await self.connected_http()
        below = self._work_path(path, allow_root=action != "remove")
        payload = {"path": below, **options}
        limits: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
        if action == "remove":
            limits["within_s"] = _REMOVE_S
        return await http.call("POST", self.path(f"/files/{action}"), payload, **limits)
