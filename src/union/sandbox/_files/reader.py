"""Read a file that hostile code may be changing: check its type, and treat its size as a hint."""

from __future__ import annotations

import functools
import os
import stat
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._core.file_errors import not_regular_error, too_large_error

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["FileReader", "read_whole"]

_MIN_READ_BYTES: Final = 64 * 1024
_MAX_READ_BYTES: Final = 1024 * 1024 * 1024  # the kernel reads less than 2 GiB per call


class Tree(Protocol):
    """A directory tree that files are read from."""

    def shown(self, rel: str) -> str:
        """Return ``rel`` as error messages show it."""
        ...

    def borrow_root(self, rel: str) -> AbstractContextManager[int]:
        """Lend the root descriptor for work on ``rel``; translate its errors."""
        ...

    def open_file(self, root: int, rel: str) -> int:
        """Open ``rel`` for reading without blocking; the caller closes it."""
        ...


class FileReader:
    """Read one file in chunks. The first ``read()`` opens it; ``close()`` must always follow."""

    def __init__(self, tree: Tree, rel: str, *, max_bytes: int) -> None:
        self._tree = tree
        self._rel = rel
        self._shown = tree.shown(rel)
        self._max_bytes = max_bytes
        self._fd = -1
        self._total = 0

    def read(self, size: int) -> bytes:
        """Return the next chunk, empty at the end; raise if the file exceeds the limit."""
        with self._tree.borrow_root(self._rel) as root:
            if self._fd < 0:
                self._fd = self._tree.open_file(root, self._rel)
                _check_size(self._fd, self._shown, max_bytes=self._max_bytes)
            chunk = os.read(self._fd, min(size, self._max_bytes - self._total + 1))
        self._total += len(chunk)
        if self._total > self._max_bytes:
            raise too_large_error(self._shown, size=self._total, max_bytes=self._max_bytes)
        return chunk

    def close(self) -> None:
        """Close the file if it was opened."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_whole(fd: int, rel: str, *, max_bytes: int) -> bytes:
    """Read an open file to its end, also while it grows, but never past the limit."""
    # A sparse file claims any size at no cost; reading it would exhaust memory.
    expected = _check_size(fd, rel, max_bytes=max_bytes)
    if expected > _machine_memory():
        raise too_large_error(rel, size=expected, max_bytes=max_bytes)
    chunks: list[bytes] = []
    total = 0
    while True:
        # Requesting one byte more than expected detects the end without a second full-size read,
        # so that a typical file arrives in one chunk that is returned without a copy.
        size = min(
            max(expected - total + 1, _MIN_READ_BYTES), max_bytes - total + 1, _MAX_READ_BYTES
        )
        chunk = os.read(fd, size)
        if not chunk:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.append(chunk)
        total += len(chunk)
        if total > max_bytes:
            raise too_large_error(rel, size=total, max_bytes=max_bytes)


def _check_size(fd: int, rel: str, *, max_bytes: int) -> int:
    """Return the size of a regular file; raise if it is another type or exceeds the limit."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise not_regular_error(found.st_mode, rel)
    if found.st_size > max_bytes:
        raise too_large_error(rel, size=found.st_size, max_bytes=max_bytes)
    return found.st_size


@functools.cache
def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
