"""Descriptions of files in a work dir, and of copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "VENV_DIR",
    "ChangeKind",
    "FileChange",
    "FileInfo",
    "FileKind",
    "SkipReason",
    "Skipped",
    "Transfer",
]

VENV_DIR: Final = ".sandbox-venv"
"""The directory of the session venv, relative to the work dir."""

FileKind = Literal["file", "dir", "symlink", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One file, directory or link of a work dir; a link is described, not followed."""

    path: str
    """Relative to the work dir; bytes that are not UTF-8 are kept by ``surrogateescape``."""
    kind: FileKind
    """``other`` is a FIFO, a socket or a device."""
    size: int
    """Bytes."""
    mode: int
    """Permission bits only."""
    mtime: float
    """Seconds since the epoch."""

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]


ChangeKind = Literal["created", "changed", "deleted", "overflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One change that ``watch()`` reports."""

    path: str
    """The path that changed, below the watched path as it was given."""
    kind: ChangeKind
    """A rename is ``deleted`` and ``created``. ``overflow``: more changes than the kernel keeps, so
    some are missing."""


SkipReason = Literal["symlink", "special", "changed", "venv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One entry of a tree that was not copied."""

    path: str
    """Relative to the top of the tree."""
    reason: SkipReason
    """``symlink``; ``special``: a FIFO, socket or device; ``changed``: removed or replaced during
    the copy; ``venv``: the session venv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The result of ``upload()`` or ``download()``."""

    files: int
    """Files copied."""
    dirs: int
    """Directories below the top of the tree."""
    bytes: int
    """Bytes copied."""
    skipped: tuple[Skipped, ...] = ()
    """Entries that were not copied."""
