"""MemoryFiles: a work dir in memory, as the file half of a scripted transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import (
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    not_empty_error,
)
from union.sandbox._core.files import FileInfo
from union.sandbox._core.paths import work_path
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Mapping

    from union.sandbox._core.processes import ProcessInfo

__all__ = ["MemoryFiles"]

_CHUNK_BYTES: Final = 64 * 1024
_DIR_MODE: Final = 0o755
_FILE_MODE: Final = 0o644


class MemoryFiles:
    """Files by path, with the rules and errors of a real work dir."""

    def __init__(self, work_dir: str, files: Mapping[str, bytes] | None = None) -> None:
        self.files: dict[str, bytes] = {}
        """Content by path below the work dir; kept after the session has closed."""
        self._work_dir = work_dir
        self._dirs: set[str] = set()
        self._modes: dict[str, int] = {}
        for path, data in (files or {}).items():
            self.files[work_path(path, work_dir=work_dir, argument="files")] = bytes(data)

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        """Store a file."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SandboxUsageError(
                f"data must be bytes, not {type(data).__name__}", argument="data"
            )
        name = self._writable_name(path, mode=mode, overwrite=overwrite)
        self._make_parents(name)
        self.files[name], self._modes[name] = bytes(data), mode
        return len(self.files[name])

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Return the content of a file."""
        name = self._below(path)
        self._check_parents(name)
        if self._is_dir(name):
            raise SandboxIsADirectoryError(f"{name!r} is a directory", path=name)
        if name not in self.files:
            raise _not_found_error(name)
        data = self.files[name]
        if len(data) > max_bytes:
            raise SandboxFileTooLargeError(
                f"{name!r} has {len(data)} bytes; max_bytes is {max_bytes}", path=name
            )
        return data

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        """Store a file from chunks."""
        self._writable_name(path, mode=mode, overwrite=overwrite)
        data = b"".join([chunk async for chunk in chunks])
        return await self.put(path, data, mode=mode, overwrite=overwrite)

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in chunks."""
        data = await self.get(path, max_bytes=max_bytes)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return the entries of a directory."""
        name = self._below(path, allow_root=True)
        if self._info(name).kind != "dir":
            raise _not_a_directory_error(name)
        prefix = "" if name == "." else f"{name}/"
        known = (*self.files, *self._dirs)
        below = {each[len(prefix) :].split("/")[0] for each in known if each.startswith(prefix)}
        return tuple(self._info(prefix + each) for each in sorted(below))

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return no process: nothing stays between scripted commands."""
        return ()

    async def stop_process(self, pid: int) -> bool:  # noqa: ARG002 - of the protocol
        """Return that there is no such process."""
        return False

    async def stat(self, path: str) -> FileInfo:
        """Return the description of a file or directory."""
        return self._info(self._below(path, allow_root=True))

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        """Create a directory."""
        name = self._below(path, allow_root=True)
        self._check_parents(name)
        above = name.rpartition("/")[0]
        if above and not parents and not self._is_dir(above):
            raise _not_found_error(above)
        if name in self.files:
            raise _exists_error(name)
        if self._is_dir(name) and not exist_ok:
            raise _exists_error(name)
        self._make_parents(f"{name}/")

    async def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file or directory."""
        name = self._below(path)
        kind = self._info(name).kind
        inside = {n for n in (*self.files, *self._dirs) if n.startswith(f"{name}/")}
        if kind == "dir" and inside and not recursive:
            raise not_empty_error(name)
        for each in {name, *inside}:
            self.files.pop(each, None)
            self._modes.pop(each, None)
            self._dirs.discard(each)

    def _below(self, path: str, *, allow_root: bool = False) -> str:
        return work_path(path, work_dir=self._work_dir, allow_root=allow_root)

    def _writable_name(self, path: str, *, mode: int, overwrite: bool) -> str:
        """Return the name of a file that may be written, or raise."""
        name = self._below(path)
        if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o777:
            raise SandboxUsageError(
                f"mode must be permission bits between 0 and 0o777, not {mode!r}", argument="mode"
            )
        self._check_parents(name)
        if self._is_dir(name):
            raise SandboxIsADirectoryError(f"{name!r} is a directory", path=name)
        if not overwrite and name in self.files:
            raise _exists_error(name)
        return name

    def _check_parents(self, name: str) -> None:
        for parent in _parents(name):
            if parent in self.files:
                raise _not_a_directory_error(parent)

    def _make_parents(self, name: str) -> None:
        """Create the parent directories, which remain when their files are removed."""
        self._dirs.update(_parents(name))

    def _is_dir(self, name: str) -> bool:
        if name == "." or name in self._dirs:
            return True
        # A reply may add files to the mapping without creating their directories.
        return any(other.startswith(f"{name}/") for other in self.files)

    def _info(self, name: str) -> FileInfo:
        self._check_parents(name)
        if name in self.files:
            mode = self._modes.get(name, _FILE_MODE)
            size = len(self.files[name])
            return FileInfo(path=name, kind="file", size=size, mode=mode, mtime=0.0)
        if self._is_dir(name):
            return FileInfo(path=name, kind="dir", size=0, mode=_DIR_MODE, mtime=0.0)
        raise _not_found_error(name)


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _not_found_error(name: str) -> SandboxFileNotFoundError:
    return SandboxFileNotFoundError(f"{name!r} does not exist", path=name)


def _exists_error(name: str) -> SandboxFileExistsError:
    return SandboxFileExistsError(f"{name!r} exists already", path=name)


def _not_a_directory_error(name: str) -> SandboxNotADirectoryError:
    return SandboxNotADirectoryError(f"{name!r} is not a directory", path=name)
