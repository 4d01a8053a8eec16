"""Archives on this machine, read and written in chunks beside the event loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from union.sandbox._session import threads
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["read_chunks", "write_chunks"]

CHUNK: Final = 256 * 1024


async def write_chunks(path: str | os.PathLike[str], chunks: AsyncIterator[bytes]) -> int:
    """Write the chunks to a file, which replaces ``path`` when it is complete.

    Raises:
        SandboxUsageError: ``path`` is a directory, a device or a pipe.

    """
    if await threads.files.run(path, _is_special, path):
        raise SandboxUsageError(
            f"path={os.fspath(path)!r} exists and is no regular file",
            argument="path",
            hint="give the name of a new file, or of a file to replace",
        )
    temporary = f"{os.fspath(path)}.part-{os.urandom(6).hex()}"
    total = 0
    file = await threads.files.run(temporary, open, temporary, "xb")
    try:
        try:
            async for chunk in chunks:
                total += await threads.files.run(temporary, file.write, chunk)
        finally:
            await threads.files.run(temporary, file.close)
        await threads.files.run(temporary, os.replace, temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return total


def _is_special(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


async def read_chunks(path: str | os.PathLike[str]) -> AsyncIterator[bytes]:
    """Yield the content of a file."""
    file = await threads.files.run(path, open, path, "rb")
    try:
        while chunk := await threads.files.run(path, file.read, CHUNK):
            yield chunk
    finally:
        await threads.files.run(path, file.close)
