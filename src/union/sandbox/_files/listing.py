"""What is in a directory, told without following anything."""

from __future__ import annotations

import contextlib
import os
import stat

from union.sandbox._core.file_errors import SandboxFileTooLargeError
from union.sandbox._core.files import FileInfo, FileKind
from union.sandbox._core.paths import shown_path

__all__ = ["described", "entries_of"]


def entries_of(fd: int, rel: str, *, max_entries: int) -> tuple[FileInfo, ...]:
    """Describe what is in the open directory ``fd``, which is ``rel`` of its tree, by name."""
    prefix = "" if rel == "." else f"{rel}/"
    infos: list[FileInfo] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if len(infos) >= max_entries:
                msg = f"{shown_path(rel)} has more than {max_entries} entries"
                raise SandboxFileTooLargeError(msg, path=rel, code="too-many-entries")
            # Gone since it was listed: then it is not in the directory.
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
                infos.append(described(prefix + name, found))
    return tuple(sorted(infos, key=lambda info: info.path))


def described(path: str, found: os.stat_result) -> FileInfo:
    """Put what the kernel says into our words."""
    kinds: dict[int, FileKind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "dir",
        stat.S_IFLNK: "symlink",
    }
    return FileInfo(
        path=path,
        kind=kinds.get(stat.S_IFMT(found.st_mode), "other"),
        size=found.st_size,
        mode=stat.S_IMODE(found.st_mode),
        mtime=found.st_mtime,
    )
