"""Checkpoints as tar archives: written from a tree that is hostile, read into a new directory."""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import tempfile
from typing import IO, TYPE_CHECKING, Final

from union.sandbox._core.paths import shown_path
from union.sandbox._linux.openat2 import PIN_DIR, open_beneath
from union.sandbox._linux.tree import WorkTree
from union.sandbox._session import threads
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterator

__all__ = ["exported", "imported"]

_CHUNK: Final = 256 * 1024
_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY
_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_MODES: Final = 0o777


async def exported(root: int, place: str) -> AsyncIterator[bytes]:
    """Yield an archive of the tree below the descriptor ``root``.

    Args:
        root: the tree, which nothing changes meanwhile.
        place: a directory for a temporary file of the same size.

    """
    with tempfile.TemporaryFile(dir=place) as file:
        await threads.files.run(file, _write, root, file)
        file.seek(0)
        while chunk := await threads.files.run(file, file.read, _CHUNK):
            yield chunk


async def imported(
    chunks: AsyncIterable[bytes],
    target: str,
    place: str,
    *,
    owner: tuple[int, int],
    max_bytes: int | None = None,
) -> None:
    """Fill the empty directory ``target`` from an archive.

    Args:
        chunks: the archive.
        target: a directory that no other process writes.
        place: a directory for a temporary file of the same size.
        owner: user and group of the files, if this is root.
        max_bytes: limit of the archive; None for none.

    Raises:
        SandboxUsageError: it is no tar archive, has a path outside of the tree, or is too large.

    """
    with tempfile.TemporaryFile(dir=place) as file:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
                raise SandboxUsageError(
                    f"the archive has more than {max_bytes} bytes, which is the room that the "
                    "checkpoints of the session have left",
                    code="checkpoint-limit",
                    hint="drop() those that are not needed",
                )
            await threads.files.run(file, file.write, chunk)
        file.seek(0)
        await threads.files.run(file, _read, file, target, owner)


def _write(root: int, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        pending = [b""]
        while pending:
            where = pending.pop()
            for name, found in _entries(root, where):
                path = where + b"/" + name if where else name
                _add(archive, root, path, found)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(path)


def _entries(root: int, where: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    fd = open_beneath(root, where or b".", flags=_READ_DIR)
    try:
        with os.scandir(fd) as entries:
            names = sorted(os.fsencode(entry.name) for entry in entries)
        for name in names:
            yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)
    finally:
        os.close(fd)


def _add(archive: tarfile.TarFile, root: int, path: bytes, found: os.stat_result) -> None:
    item = tarfile.TarInfo(os.fsdecode(path))
    item.mode = stat.S_IMODE(found.st_mode) & _MODES
    item.mtime = found.st_mtime
    if stat.S_ISDIR(found.st_mode):
        item.type = tarfile.DIRTYPE
        archive.addfile(item)
    elif stat.S_ISLNK(found.st_mode):
        above, _, leaf = path.rpartition(b"/")
        parent = open_beneath(root, above or b".", flags=PIN_DIR)
        try:
            item.type = tarfile.SYMTYPE
            item.linkname = os.fsdecode(os.readlink(leaf, dir_fd=parent))
        finally:
            os.close(parent)
        archive.addfile(item)
    elif stat.S_ISREG(found.st_mode):
        fd = open_beneath(root, path, flags=_READ_FILE)
        with os.fdopen(fd, "rb") as content:
            item.size = os.fstat(fd).st_size
            archive.addfile(item, content)


def _read(file: IO[bytes], target: str, owner: tuple[int, int]) -> None:
    tree = WorkTree(target)
    tree.owner = owner if os.geteuid() == 0 else None
    modes: list[tuple[str, int]] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for item in archive:
                path = _checked(item.name)
                if item.isdir():
                    tree.make_dir(path, parents=True, exist_ok=True)
                    modes.append((path, item.mode & _MODES))
                elif item.issym():
                    tree.put_link(path, item.linkname)
                elif item.isreg():
                    _put(tree, archive, item, path)
        # Last: a directory may be closed to its owner.
        for path, mode in reversed(modes):
            os.chmod(f"{target}/{path}", mode)
    except (tarfile.TarError, EOFError) as exc:
        raise SandboxUsageError(
            f"the archive cannot be read: {exc}",
            argument="path",
            hint="use a file that Checkpoint.export() has written",
        ) from exc
    finally:
        tree.close()


def _put(tree: WorkTree, archive: tarfile.TarFile, item: tarfile.TarInfo, path: str) -> None:
    if item.sparse is not None:
        raise SandboxUsageError(
            f"the archive has a sparse file, whose size is not limited: {shown_path(path)}",
            argument="path",
            hint="use a file that Checkpoint.export() has written",
        )
    content = archive.extractfile(item)
    if content is None:
        return
    with contextlib.closing(content):
        tree.put_stream(path, iter(lambda: content.read(_CHUNK), b""), mode=item.mode & _MODES)


def _checked(name: str) -> str:
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise SandboxUsageError(
            f"the archive has a path outside of the tree: {shown_path(name)}",
            argument="path",
            hint="use a file that Checkpoint.export() has written",
        )
    return name
