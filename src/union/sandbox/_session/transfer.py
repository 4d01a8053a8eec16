"""Copy files and directory trees between a work dir and the caller's file system.

Rules of this file:

- Neither side is trusted: names are checked before use, sizes are hints, and an entry that is no
  longer a file when it is copied is skipped and reported.
- Everything is counted first, within the limits. The copy applies the same limits again, because
  the tree may have grown.
- Links and special files are skipped and reported; none is ever followed or created.
- Each file appears complete or not at all. Files copied before an error remain.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox import constants
from union.sandbox._core.file_errors import (
    SandboxFileError,
    SandboxFileTooLargeError,
    SandboxIsADirectoryError,
    SandboxNotRegularError,
    SandboxPathError,
    not_regular_error,
    translate_os_errors,
)
from union.sandbox._core.files import VENV_DIR, FileInfo, Skipped, Transfer
from union.sandbox._core.paths import MAX_PATH_BYTES, shown_path, visible_path, work_path
from union.sandbox._files.listing import file_info
from union.sandbox._files.local import LocalTree
from union.sandbox._session import threads
from union.sandbox._session.async_files import AsyncFiles
from union.sandbox.errors import SandboxConnectionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from union.sandbox._core.files import SkipReason
    from union.sandbox._session.transport import Files, Transport

__all__ = ["Options", "Progress", "checked_options", "download", "upload"]

Progress = Callable[[int, int | None, str], None]
"""Called with bytes copied, total bytes (None while counting) and the current path."""

_SMALL_BYTES: Final = 256 * 1024
"""Files up to this size are copied in one piece."""
_OWNER_READ_WRITE: Final = 0o600

_CHANGED: Final = frozenset(
    {
        "file-busy",
        "file-not-found",
        "is-a-directory",
        "not-a-directory",
        "not-regular",
        "path-outside",
        "path-symlink",
    }
)
"""Error codes for an entry that was removed or replaced after it was counted."""


class _ChangedError(Exception):
    """An entry was removed or replaced after it was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one copy."""

    overwrite: bool
    max_bytes: int
    max_files: int
    progress: Progress | None
    live: Callable[[], Transport]
    """Returns the transport of the open session; raises if the session is closed."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Source or target of a copy: the top of a tree, or a single file."""

    files: Files
    top: str

    def at(self, rel: str) -> str:
        return rel if self.top == "." else f"{self.top}/{rel}"


def checked_options(
    live: Callable[[], Transport],
    *,
    overwrite: object,
    max_bytes: object,
    max_files: object,
    progress: object,
) -> Options:
    """Check the arguments that ``upload()`` and ``download()`` share."""
    if not isinstance(overwrite, bool):
        raise SandboxUsageError(
            f"overwrite must be True or False, not {overwrite!r}", argument="overwrite"
        )
    if progress is not None and (not callable(progress) or inspect.iscoroutinefunction(progress)):
        raise SandboxUsageError(
            f"progress must be a plain function of (done, total, path), not {progress!r}",
            argument="progress",
        )
    return Options(
        overwrite=overwrite,
        max_bytes=_limit(max_bytes, "max_bytes", constants.MAX_TREE_BYTES),
        max_files=_limit(max_files, "max_files", constants.MAX_TREE_FILES),
        progress=progress,
        live=live,
    )


def _limit(value: object, argument: str, default: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SandboxUsageError(
            f"{argument} must be a whole number, or 0 for the session's limit, not {value!r}",
            argument=argument,
        )
    return value or default


async def _connected(options: Options) -> Transport:
    """Return the transport once its work dir is known: a server reports it when connected."""
    transport = options.live()
    if not transport.is_known:
        await transport.stat(".")
    return transport


def _inside_path(transport: Transport, path: object, *, allow_root: bool = False) -> str:
    """Return the path as the file calls of the transport take it."""
    if getattr(transport, "is_machine", False):
        return visible_path(path, work_dir=transport.work_dir)
    return work_path(path, work_dir=transport.work_dir, allow_root=allow_root)


async def upload(local: object, path: str, options: Options) -> Transfer:
    """Copy a file or a tree of the caller into the work dir."""
    source = _local_path(local)
    transport = await _connected(options)
    top = _inside_path(transport, path, allow_root=True)
    found = await threads.files.run(transport, _local_info, source)
    if found.kind == "dir":
        async with _local_side(source, ".") as side:
            copy = _Copy(side, _Side(transport, top), options)
            return await copy.tree(exclude=VENV_DIR if top == "." else "")
    # The caller's path itself is trusted and may be a link; below a directory none is followed.
    real = await threads.files.run(transport, os.path.realpath, source)
    async with _local_side(*os.path.split(real)) as side:
        target = _inside_path(transport, path)
        return await _Copy(side, _Side(transport, target), options).file(found)


async def download(path: str, local: object, options: Options) -> Transfer:
    """Copy a file or a tree of the work dir to the caller's side."""
    target = _local_path(local)
    transport = await _connected(options)
    top = _inside_path(transport, path, allow_root=True)
    found = await transport.stat(top)
    source = _Side(transport, top)
    if found.kind == "dir":
        await threads.files.run(transport, _make_dirs, target)
        async with _local_side(target, ".") as side:
            copy = _Copy(source, side, options)
            return await copy.tree(exclude=VENV_DIR if top == "." else "")
    if found.kind != "file":
        raise _not_copied_error(found)
    above, name = os.path.split(target)
    if name in {"", ".", ".."}:
        msg = f"local={shown_path(target)} names a directory, and {shown_path(top)} is a file"
        raise SandboxIsADirectoryError(msg, path=target, hint="give the file's name too")
    await threads.files.run(transport, _make_dirs, above or ".")
    async with _local_side(above or ".", name) as side:
        return await _Copy(source, side, options).file(found)


class _Copy:
    """One copy from source to target."""

    def __init__(self, source: _Side, target: _Side, options: Options) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._done = 0
        self._total: int | None = None
        self._seen = 0
        self._copied = 0
        self._dirs: list[str] = []
        self._files: list[tuple[str, FileInfo]] = []
        self._skipped: list[Skipped] = []

    async def file(self, info: FileInfo) -> Transfer:
        """Copy the one file that both sides name."""
        self._count(info.size)
        self._total = info.size
        name = self._source.top.rpartition("/")[2]
        try:
            await self._copy_file(name, info, source=self._source.top, target=self._target.top)
        except _ChangedError as changed:
            raise changed.__cause__ or changed from None
        return self._result()

    async def tree(self, *, exclude: str) -> Transfer:
        """Copy everything below the top, except its entry ``exclude``."""
        await self._count_entries(exclude)
        self._total = sum(info.size for _, info in self._files)
        await self._make_dir(self._target.top)
        for rel in self._dirs:
            await self._make_dir(self._target.at(rel))
        for rel, info in self._files:
            try:
                await self._copy_file(
                    rel, info, source=self._source.at(rel), target=self._target.at(rel)
                )
            except _ChangedError:
                self._skip(rel, "changed")
        return self._result()

    def _result(self) -> Transfer:
        return Transfer(
            files=self._copied,
            dirs=len(self._dirs),
            bytes=self._done,
            skipped=tuple(self._skipped),
        )

    # Counting.

    async def _count_entries(self, exclude: str) -> None:
        waiting = [""]
        size = 0
        while waiting:
            where = waiting.pop()
            try:
                entries = await self._source.files.list_dir(
                    self._source.at(where) if where else self._source.top
                )
            except SandboxFileError as exc:
                if not where or exc.code not in _CHANGED:
                    raise
                self._skip(where, "changed")
                continue
            if where:
                self._dirs.append(where)
            for info in entries:
                rel = self._checked_path(info, where)
                if rel == exclude:
                    self._skip(rel, "venv")
                elif info.kind == "file":
                    size += info.size
                    self._files.append((rel, info))
                elif info.kind == "dir":
                    waiting.append(rel)
                else:
                    self._skip(rel, "symlink" if info.kind == "symlink" else "special")
                self._count(size)
            self._report(where)

    def _checked_path(self, info: FileInfo, where: str) -> str:
        """Return the path of an entry below the top; raise if a file system cannot contain it."""
        name = info.name
        rel = f"{where}/{name}" if where else name
        if (
            info.path != self._source.at(rel)
            or name in {"", ".", ".."}
            or "\0" in name
            or info.size < 0
        ):
            msg = f"{shown_path(where or '.')} lists an invalid entry: {shown_path(info.path)}"
            raise SandboxFileError(msg, path=where, code="bad-entry")
        longest = max(len(_encoded(self._source.at(rel))), len(_encoded(self._target.at(rel))))
        if rel.count("/") > constants.MAX_TREE_DEPTH or longest > MAX_PATH_BYTES:
            msg = (
                f"{shown_path(rel)} is too deep: the limit is {constants.MAX_TREE_DEPTH} levels "
                f"and {MAX_PATH_BYTES} bytes of path"
            )
            raise SandboxFileTooLargeError(msg, path=rel, code="tree-too-deep")
        self._seen += 1
        return rel

    def _count(self, size: int) -> None:
        """Raise if the entries exceed the limits."""
        if self._seen > self._options.max_files:
            msg = f"the tree has more than max_files={self._options.max_files} entries"
            raise SandboxFileTooLargeError(
                msg, path=self._source.top, code="too-many-files", hint="raise max_files"
            )
        if size > self._options.max_bytes:
            raise self._too_large()

    def _too_large(self) -> SandboxFileTooLargeError:
        top, limit = shown_path(self._source.top), self._options.max_bytes
        msg = f"{top} has more than max_bytes={limit} bytes"
        return SandboxFileTooLargeError(msg, path=self._source.top, hint="raise max_bytes")

    # Copying.

    async def _make_dir(self, path: str) -> None:
        if path != ".":
            await self._target.files.make_dir(path, parents=True, exist_ok=True)

    async def _copy_file(self, rel: str, info: FileInfo, *, source: str, target: str) -> None:
        mode = (info.mode | _OWNER_READ_WRITE) & 0o777
        overwrite = self._options.overwrite
        data = await self._read_small(source) if info.size <= _SMALL_BYTES else None
        if data is not None:
            await self._target.files.put(target, data, mode=mode, overwrite=overwrite)
            self._done += len(data)
        else:
            async with contextlib.aclosing(self._chunks(source, rel)) as chunks:
                try:
                    await self._target.files.write(target, chunks, mode=mode, overwrite=overwrite)
                except SandboxConnectionError:
                    self._options.live()  # raises if the connection ended with the session
                    raise
        self._copied += 1
        self._report(rel)

    async def _read_small(self, source: str) -> bytes | None:
        """Return the content of a small file; None if it has grown."""
        left = self._options.max_bytes - self._done
        try:
            return await self._source.files.get(source, max_bytes=min(_SMALL_BYTES, left))
        except SandboxFileTooLargeError:
            return None
        except SandboxFileError as exc:
            if exc.code not in _CHANGED:
                raise
            raise _ChangedError from exc

    async def _chunks(self, source: str, rel: str) -> AsyncGenerator[bytes, None]:
        left = self._options.max_bytes - self._done
        try:
            async with contextlib.aclosing(
                self._source.files.read(source, max_bytes=left)
            ) as chunks:
                async for chunk in chunks:
                    yield chunk
                    self._done += len(chunk)
                    self._report(rel)
        except SandboxFileTooLargeError as exc:
            raise self._too_large() from exc
        except SandboxFileError as exc:
            if exc.code not in _CHANGED:
                raise
            raise _ChangedError from exc

    def _skip(self, rel: str, reason: SkipReason) -> None:
        self._skipped.append(Skipped(path=rel, reason=reason))

    def _report(self, rel: str) -> None:
        self._options.live()
        if self._options.progress is not None:
            self._options.progress(self._done, self._total, rel)


@contextlib.asynccontextmanager
async def _local_side(path: str, top: str) -> AsyncIterator[_Side]:
    tree = LocalTree(path)
    try:
        await threads.files.run(tree, tree.open)
        name = os.fsencode(top).decode("utf-8", "surrogateescape")
        yield _Side(AsyncFiles(tree, work_dir=path, argument="local"), name)
    finally:
        tree.close()


def _local_info(local: str) -> FileInfo:
    """Describe the file or directory that the caller's path leads to."""
    with translate_os_errors(local, argument="local"):
        found = os.stat(local)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise not_regular_error(found.st_mode, local)
        return file_info(local, found)


def _make_dirs(local: str) -> None:
    with translate_os_errors(local, argument="local"):
        os.makedirs(local, exist_ok=True)


def _local_path(local: object) -> str:
    if not isinstance(local, (str, bytes, os.PathLike)):
        raise SandboxUsageError(
            f"local must be a str, bytes or path object, not {type(local).__name__}",
            argument="local",
        )
    path = os.fsdecode(local)
    if not path or "\0" in path:
        raise SandboxUsageError(
            f"local={shown_path(path)} is not a path: it is empty or contains a NUL character",
            argument="local",
        )
    return path


def _not_copied_error(info: FileInfo) -> SandboxFileError:
    shown = shown_path(info.path)
    if info.kind == "symlink":
        msg = f"{shown} is a symbolic link; links are not followed"
        return SandboxPathError(msg, path=info.path, code="path-symlink")
    msg = f"{shown} is a FIFO, a socket or a device; only files and directories are copied"
    return SandboxNotRegularError(msg, path=info.path)


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
