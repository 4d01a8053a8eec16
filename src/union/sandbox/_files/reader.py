"""Reading a file that someone hostile may be changing: its size is a hint, its kind is checked."""

from __future__ import annotations

import functools
import os
import stat
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._core.file_errors import not_regular_error, too_large_error

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["OldFile", "read_whole"]

_PIECE: Final = 64 * 1024
_MOST_PER_CALL: Final = 1024 * 1024 * 1024  # one read moves a little under 2 GiB


class Tree(Protocol):
    """Where files are."""

    def named(self, rel: str) -> str:
        """How a path is shown in an error."""
        ...

    def entered(self, rel: str) -> AbstractContextManager[int]:
        """Lend the root for work on ``rel``, whose errors are put into our words."""
        ...

    def open_file(self, root: int, rel: str) -> int:
        """Open ``rel`` for reading, without waiting; the caller closes it."""
        ...


class OldFile:
    """One file that is read in pieces; opened with the first. ``close()`` it in any case."""

    def __init__(self, tree: Tree, rel: str, *, max_bytes: int) -> None:
        self._tree = tree
        self._rel = rel
        self._shown = tree.named(rel)
        self._max_bytes = max_bytes
        self._fd = -1
        self._total = 0

    def piece(self, size: int) -> bytes:
        """The next piece, empty at the end; more than the limit is an error."""
        with self._tree.entered(self._rel) as root:
            if self._fd < 0:
                self._fd = self._tree.open_file(root, self._rel)
                _checked_size(self._fd, self._shown, max_bytes=self._max_bytes)
            piece = os.read(self._fd, min(size, self._max_bytes - self._total + 1))
        self._total += len(piece)
        if self._total > self._max_bytes:
            raise too_large_error(self._shown, size=self._total, max_bytes=self._max_bytes)
        return piece

    def close(self) -> None:
        """Let go of the file, if it was opened."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_whole(fd: int, rel: str, *, max_bytes: int) -> bytes:
    """Read an open file to its end; followed while it grows, but never past the limit."""
    # Sparse files lie about their size for free; memory is what would be used up.
    expected = _checked_size(fd, rel, max_bytes=max_bytes)
    if expected > _machine_memory():
        raise too_large_error(rel, size=expected, max_bytes=max_bytes)
    pieces: list[bytes] = []
    total = 0
    while True:
        # One byte more than there should be: whether the file ends there shows at once, and the
        # usual file arrives in one piece that is returned as it is.
        ask = min(max(expected - total + 1, _PIECE), max_bytes - total + 1, _MOST_PER_CALL)
        piece = os.read(fd, ask)
        if not piece:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.append(piece)
        total += len(piece)
        if total > max_bytes:
            raise too_large_error(rel, size=total, max_bytes=max_bytes)


def _checked_size(fd: int, rel: str, *, max_bytes: int) -> int:
    """The size of a regular file within the limit."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise not_regular_error(found.st_mode, rel)
    if found.st_size > max_bytes:
        raise too_large_error(rel, size=found.st_size, max_bytes=max_bytes)
    return found.st_size


@functools.cache
def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
