"""MachineFiles: the file operations of a session in machine mode, which run inside the sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from union.sandbox import constants
from union.sandbox._session.own_loop import in_own_loop, iterate_in
from union.sandbox._session.session_files import SessionFiles, checked_flag
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from union.sandbox._core.files import FileChange

__all__ = ["InsideCalls", "MachineFiles"]


class InsideCalls(Protocol):
    """The calls that a transport offers in machine mode, besides those of every session."""

    async def append(self, path: str, data: bytes, *, mode: int) -> int: ...

    async def rename(self, source: str, target: str, *, overwrite: bool) -> None: ...

    async def glob(self, pattern: str, *, hidden: bool) -> tuple[str, ...]: ...

    def watch(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChange | None, None]:
        """Yield None when the watch has begun, and then each change."""
        ...

    def archive(
        self, path: str, *, exclude: tuple[str, ...], max_bytes: int
    ) -> AsyncGenerator[bytes, None]: ...

    async def extract(self, path: str, chunks: AsyncIterable[bytes]) -> int: ...


class MachineFiles(SessionFiles):
    """File operations of ``persist="machine"``. ``Session`` inherits them.

    A helper inside the sandbox performs them, with its rights: paths are any that are visible
    inside, relative ones refer to the work dir, and links are followed.
    """

    async def _inside(self, call: str) -> InsideCalls:
        transport = self._live()
        connect = getattr(transport, "connect_inside", None)
        inside: InsideCalls | None = None if connect is None else await connect()
        if inside is None:
            raise SandboxUsageError(
                f"{call}() needs a session with persist='machine'",
                code="needs-machine",
                hint="open the session with persist='machine', or run a command",
            )
        return inside

    @in_own_loop
    async def append(self, path: str, data: bytes, *, mode: int = 0o644) -> int:
        """Add bytes to the end of a file, creating it with its parents; return its new size.

        Needs ``persist="machine"``.

        Args:
            path: a path inside.
            data: the bytes to add, bytes-like. Up to 1 MiB is written at once.
            mode: permission bits of a new file; 0o644 by default.

        """
        inside = await self._inside("append")
        return await inside.append(path, data, mode=mode)

    @in_own_loop
    async def rename(self, source: str, target: str, *, overwrite: bool = True) -> None:
        """Rename a file, link or directory.

        Needs ``persist="machine"``.

        Args:
            source: a path inside.
            target: the new path, on the same file system.
            overwrite: whether to replace a file or an empty directory; True by default.

        Raises:
            SandboxFileExistsError: the target exists and ``overwrite`` is false.

        """
        inside = await self._inside("rename")
        await inside.rename(source, target, overwrite=checked_flag(overwrite, "overwrite"))

    @in_own_loop
    async def glob(self, pattern: str, *, hidden: bool = False) -> tuple[str, ...]:
        """Return the paths that match a pattern, sorted.

        Needs ``persist="machine"``.

        Args:
            pattern: with ``*``, ``?``, ``[...]``, and ``**`` for any number of directories;
                relative to the work dir, or absolute.
            hidden: whether wildcards match names that begin with a dot; False by default.

        """
        inside = await self._inside("glob")
        return await inside.glob(pattern, hidden=checked_flag(hidden, "hidden"))

    def watch(self, path: str = ".", *, recursive: bool = False) -> AsyncIterator[FileChange]:
        """Yield the changes of a file or in a directory as they happen, until iteration ends.

        Needs ``persist="machine"``. The watch begins with the first iteration.

        Args:
            path: a file or directory inside; the work dir by default.
            recursive: whether to watch the directories below as well; False by default.

        """
        is_deep = checked_flag(recursive, "recursive")
        return self._iterate(self._watch(path, recursive=is_deep))

    async def _watch(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChange, None]:
        inside = await self._inside("watch")
        async with contextlib.aclosing(inside.watch(path, recursive=recursive)) as changes:
            async for change in changes:
                if change is not None:
                    yield change

    def archive(
        self, path: str = ".", *, exclude: Sequence[str] = (), max_bytes: int = 0
    ) -> AsyncIterator[bytes]:
        """Yield a file or directory as a tar stream, with symbolic and hard links.

        Needs ``persist="machine"``. Sockets, FIFOs, devices and files that the sandbox may not read
        are left out. A file that changes meanwhile has the size that it had at its beginning.

        Args:
            path: a file or directory inside; the work dir by default.
            exclude: paths relative to ``path`` to leave out, with everything below; none by default
                but the session venv, if ``path`` is the work dir.
            max_bytes: the largest size of the stream, in bytes; 0 (default) for 1 GiB.

        Raises:
            SandboxFileTooLargeError: the stream is larger.

        """
        names = _exclusions(exclude)
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise SandboxUsageError(
                f"max_bytes must be a whole number of bytes, not {max_bytes!r}",
                argument="max_bytes",
            )
        return self._iterate(self._archive(path, names, max_bytes or constants.MAX_FILE_BYTES))

    async def _archive(
        self, path: str, exclude: tuple[str, ...], max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        inside = await self._inside("archive")
        pieces = inside.archive(path, exclude=exclude, max_bytes=max_bytes)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    @in_own_loop
    async def extract(self, path: str, data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> int:
        """Unpack a tar stream below a directory, with its links; return the bytes of the stream.

        Needs ``persist="machine"``. Entries that would be written outside the directory end the
        call with an error, also through a link of the archive. Devices are skipped, set-id bits are
        dropped. Files that were unpacked before an error stay.

        Args:
            path: the directory inside; it is created if it does not exist.
            data: the archive, uncompressed: bytes, or an iterable of bytes.

        """
        chunks = _chunks(data)
        inside = await self._inside("extract")
        return await inside.extract(path, chunks)

    def _iterate(self, source: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        own = self._own_loop
        return source if own is None else iterate_in(own, source)


def _exclusions(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise SandboxUsageError(
            f"exclude must be a list of relative paths, not {value!r}", argument="exclude"
        )
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("/"):
            raise SandboxUsageError(
                f"exclude must be a list of relative paths, not {name!r}", argument="exclude"
            )
    return tuple(name.strip("/").removeprefix("./") for name in names)


async def _chunks(data: object) -> AsyncGenerator[bytes, None]:
    if isinstance(data, bytes | bytearray | memoryview):
        yield bytes(data)
    elif isinstance(data, AsyncIterable):
        async for chunk in data:
            yield _bytes(chunk)
    elif isinstance(data, Iterable) and not isinstance(data, str):
        for chunk in data:
            yield _bytes(chunk)
    else:
        raise _not_bytes(data)


def _bytes(chunk: object) -> bytes:
    if not isinstance(chunk, bytes | bytearray | memoryview):
        raise _not_bytes(chunk)
    return bytes(chunk)


def _not_bytes(value: object) -> SandboxUsageError:
    return SandboxUsageError(
        f"data must be bytes or an iterable of bytes, not {type(value).__name__}", argument="data"
    )
