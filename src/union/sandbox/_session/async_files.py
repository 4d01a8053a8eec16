"""Files of a tree on this machine, off the event loop: the file half of a transport."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._core.paths import work_path
from union.sandbox._session import threads

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.files import FileInfo
    from union.sandbox._files.reader import OldFile
    from union.sandbox._files.writer import NewFile

__all__ = ["BlockingTree", "TreeFiles"]

_PIECE: Final = 1024 * 1024
"""Big enough that changing threads costs little, small enough to hold many of."""


class BlockingTree(Protocol):
    """A directory whose files are worked on by calls that block."""

    def put(self, rel: str, data: bytes, *, mode: int, overwrite: bool) -> int: ...

    def get(self, rel: str, *, max_bytes: int) -> bytes: ...

    def new_file(self, rel: str, *, mode: int, overwrite: bool) -> NewFile: ...

    def old_file(self, rel: str, *, max_bytes: int) -> OldFile: ...

    def list_dir(self, rel: str) -> tuple[FileInfo, ...]: ...

    def make_dir(self, rel: str, *, parents: bool, exist_ok: bool) -> None: ...


class TreeFiles:
    """Moves files in and out of one tree."""

    def __init__(self, tree: BlockingTree, *, work_dir: str, argument: str = "path") -> None:
        self._tree = tree
        self._below = functools.partial(work_path, work_dir=work_dir, argument=argument)

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        return await threads.files.run(
            self._tree, self._tree.put, self._below(path), data, mode=mode, overwrite=overwrite
        )

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await threads.files.run(
            self._tree, self._tree.get, self._below(path), max_bytes=max_bytes
        )

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        new = self._tree.new_file(self._below(path), mode=mode, overwrite=overwrite)
        try:
            async for chunk in chunks:
                await threads.files.run(self._tree, new.write, chunk)
            return await threads.files.run(self._tree, new.commit)
        except BaseException:
            await threads.files.run(self._tree, new.abort)
            raise

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        old = self._tree.old_file(self._below(path), max_bytes=max_bytes)
        try:
            while piece := await threads.files.run(self._tree, old.piece, _PIECE):
                yield piece
        finally:
            old.close()

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        return await threads.files.run(
            self._tree, self._tree.list_dir, self._below(path, allow_root=True)
        )

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        below = self._below(path, allow_root=True)
        await threads.files.run(
            self._tree, self._tree.make_dir, below, parents=parents, exist_ok=exist_ok
        )
