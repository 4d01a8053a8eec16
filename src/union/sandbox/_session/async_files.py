"""AsyncFiles: file operations on a local tree in threads, as the file half of a transport."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._core.paths import work_path
from union.sandbox._session import threads

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.files import FileInfo
    from union.sandbox._files.reader import FileReader
    from union.sandbox._files.writer import FileWriter

__all__ = ["AsyncFiles", "BlockingFiles"]

_CHUNK_BYTES: Final = 1024 * 1024
"""Large enough to amortize the change of threads, small enough to hold many at once."""


class BlockingFiles(Protocol):
    """File operations on one directory tree that block."""

    def put(self, rel: str, data: bytes, *, mode: int, overwrite: bool) -> int: ...

    def get(self, rel: str, *, max_bytes: int) -> bytes: ...

    def open_writer(self, rel: str, *, mode: int, overwrite: bool) -> FileWriter: ...

    def open_reader(self, rel: str, *, max_bytes: int) -> FileReader: ...

    def list_dir(self, rel: str) -> tuple[FileInfo, ...]: ...

    def make_dir(self, rel: str, *, parents: bool, exist_ok: bool) -> None: ...


class AsyncFiles:
    """Run the operations of one tree in threads, after the paths were checked.

    Args:
        tree: the blocking operations.
        work_dir: the absolute path that absolute arguments must be below.
        argument: the name of the argument that error messages refer to.

    """

    def __init__(self, tree: BlockingFiles, *, work_dir: str, argument: str = "path") -> None:
        self._tree = tree
        self._checked_path = functools.partial(work_path, work_dir=work_dir, argument=argument)

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        return await threads.files.run(
            self._tree,
            self._tree.put,
            self._checked_path(path),
            data,
            mode=mode,
            overwrite=overwrite,
        )

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await threads.files.run(
            self._tree, self._tree.get, self._checked_path(path), max_bytes=max_bytes
        )

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        writer = self._tree.open_writer(self._checked_path(path), mode=mode, overwrite=overwrite)
        try:
            async for chunk in chunks:
                await threads.files.run(self._tree, writer.write, chunk)
            return await threads.files.run(self._tree, writer.commit)
        except BaseException:
            await threads.files.run(self._tree, writer.abort)
            raise

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        reader = self._tree.open_reader(self._checked_path(path), max_bytes=max_bytes)
        try:
            while chunk := await threads.files.run(self._tree, reader.read, _CHUNK_BYTES):
                yield chunk
        finally:
            reader.close()

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        return await threads.files.run(
            self._tree, self._tree.list_dir, self._checked_path(path, allow_root=True)
        )

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        checked = self._checked_path(path, allow_root=True)
        await threads.files.run(
            self._tree, self._tree.make_dir, checked, parents=parents, exist_ok=exist_ok
        )
