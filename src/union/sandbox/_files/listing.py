"""List a directory and describe its entries without following links."""

from __future__ import annotations

import contextlib
import os
import stat

from union.sandbox._core.file_errors import SandboxFileTooLargeError
from union.sandbox._core.files import FileInfo, FileKind
from union.sandbox._core.paths import shown_path

__all__ = ["file_info", "list_entries"]


def list_entries(fd: int, rel: str, *, max_entries: int) -> tuple[FileInfo, ...]:
    """Describe the entries of the open directory ``fd``, which is ``rel`` of its tree, by name."""
    prefix = "" if rel == "." else f"{rel}/"
    infos: list[FileInfo] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if len(infos) >= max_entries:
                msg = f"{shown_path(rel)} has more than {max_entries} entries"
                raise SandboxFileTooLargeError(msg, path=rel, code="too-many-entries")
            # An entry that disappeared since it was listed is not in the directory.
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
                infos.append(file_info(prefix + name, found))
    return tuple(sorted(infos, key=lambda info: info.path))


def file_info(path: str, found: os.stat_result) -> FileInfo:
    """Return the description of a file from its ``stat`` result."""
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
