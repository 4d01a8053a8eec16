"""What is known of a file in a work dir, and of files that were copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["VENV_DIR", "FileInfo", "FileKind", "SkipReason", "Skipped", "Transfer"]

VENV_DIR: Final = ".sandbox-venv"
"""Where the session venv is in the work dir."""

FileKind = Literal["file", "dir", "symlink", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One entry of a work dir, as it was when looked at; links are described, not followed."""

    path: str
    """Relative to the work dir; bytes that are not UTF-8 are kept by ``surrogateescape``."""
    kind: FileKind
    """``other`` is a FIFO, a socket or a device."""
    size: int
    mode: int
    """Permission bits only."""
    mtime: float
    """Seconds since the epoch."""

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]


SkipReason = Literal["symlink", "special", "changed", "venv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One entry of a tree that was not copied, and why.

    ``reason`` is ``symlink``; ``special`` for a FIFO, a socket or a device; ``changed`` if it was
    gone or something else when its turn came; ``venv`` for the session's own venv.
    """

    path: str
    """Below the top of the tree."""
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What ``upload()`` or ``download()`` copied, and what it did not."""

    files: int
    dirs: int
    """Directories below the top of the tree."""
    bytes: int
    skipped: tuple[Skipped, ...] = ()
