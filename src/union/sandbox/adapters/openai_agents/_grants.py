"""Operations through descriptors of the host, which no link leads astray.

A granted path is a mount point inside, where it cannot be renamed or removed. And a recursive
removal must be complete before a cancelled call returns; a command inside ends with its sandbox.
The parent directory is opened without following any link, so nothing that a sandbox does to a
directory that it can change leads to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Any

from union.sandbox._linux.openat2 import PIN, PIN_DIR, open_beneath
from union.sandbox._linux.removal import remove_entry
from union.sandbox.adapters.openai_agents._files import NOT_A_FILE

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

__all__ = [
    "completed",
    "exists",
    "is_directory",
    "make_directory",
    "remove_directory",
    "remove_grant",
    "rename_grant",
]


@contextlib.contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    folder, _, name = path.rpartition("/")
    top = os.open("/", PIN_DIR)
    try:
        at = open_beneath(top, os.fsencode(folder.strip("/") or "."), flags=PIN_DIR)
    finally:
        os.close(top)
    try:
        yield at, name
    finally:
        os.close(at)


def exists(path: str) -> bool:
    """Return whether a path exists and no link leads there.

    Names are resolved when the workspace is configured, so a link that is there now was made later,
    perhaps by sandboxed code.
    """
    top = os.open("/", PIN_DIR)
    try:
        os.close(open_beneath(top, os.fsencode(path.strip("/") or "."), flags=PIN))
    except OSError as exc:
        if exc.errno in {errno.ELOOP, errno.ENOENT, errno.ENOTDIR}:
            return False
        raise
    finally:
        os.close(top)
    return True


def make_directory(path: str) -> None:
    """Create a directory and its parents through no link. Succeeds if it already exists."""
    at = os.open("/", PIN_DIR)
    try:
        for name in filter(None, path.split("/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=at)
            below = open_beneath(at, os.fsencode(name), flags=PIN_DIR)
            os.close(at)
            at = below
    finally:
        os.close(at)


def rename_grant(source: str, target: str) -> None:
    """Rename a granted file, or a link, to the path of another grant."""
    with _parent(source) as (old, name), _parent(target) as (new, new_name):
        mode = os.stat(name, dir_fd=old, follow_symlinks=False).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, NOT_A_FILE, source)
        os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)


def remove_grant(path: str) -> None:
    """Remove a granted file, or a granted directory that is empty."""
    with _parent(path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def is_directory(path: str) -> bool:
    """Return whether a path is a directory that no link leads to."""
    try:
        with _parent(path) as (folder, name):
            return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError as exc:
        if exc.errno in {errno.ELOOP, errno.ENOENT, errno.ENOTDIR}:
            return False
        raise


def remove_directory(path: str) -> None:
    """Remove a directory and everything below it; if it is a link by now, the link itself."""
    with _parent(path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            remove_entry(folder, os.fsencode(name), shown=path)
        else:
            os.unlink(name, dir_fd=folder)


async def completed(operation: Coroutine[Any, Any, None]) -> None:
    """Await an operation. A cancelled caller gets its CancelledError when the operation is over."""
    task = asyncio.ensure_future(operation)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the cancellation is the result; mark the other as seen
        raise
