"""Files as the sandbox sees them: any visible path, links followed, permissions of its user.

Each operation is a short command inside the sandbox. So no link and no race in the tree can lead
it to a file of the host, and it behaves like the commands of the agent.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox.constants import PIPE

if TYPE_CHECKING:
    from union.sandbox._session.session import Session

__all__ = [
    "Entry",
    "exists",
    "listing",
    "make_dir",
    "read",
    "remove",
    "rename",
    "script",
    "write",
]

MAX_BYTES: Final = 256 * 1024 * 1024
"""The largest file that is read or written here."""

# Exit codes of the scripts are 64 plus a small number, which no tool in them uses.
NOT_FOUND, DENIED, IS_DIR, NOT_DIR, EXISTS, TOO_LARGE, NOT_EMPTY, LINK, INCOMPLETE = range(64, 73)
_ERRORS: Final = {
    NOT_FOUND: (FileNotFoundError, errno.ENOENT),
    DENIED: (PermissionError, errno.EACCES),
    IS_DIR: (IsADirectoryError, errno.EISDIR),
    NOT_DIR: (NotADirectoryError, errno.ENOTDIR),
    EXISTS: (FileExistsError, errno.EEXIST),
    TOO_LARGE: (OSError, errno.EFBIG),
    NOT_EMPTY: (OSError, errno.ENOTEMPTY),
    LINK: (OSError, errno.ELOOP),
    INCOMPLETE: (OSError, errno.ENOSPC),
}

# Test whether a path is missing or hidden by a directory that cannot be searched.
MISSING: Final = f"""
missing() {{
    d=$1
    while [ "$d" != / ] && [ "$d" != . ]; do
        d=$(dirname -- "$d")
        [ -d "$d" ] && {{ [ -x "$d" ] || exit {DENIED}; exit {NOT_FOUND}; }}
        [ -e "$d" ] && exit {NOT_DIR}
    done
    exit {NOT_FOUND}
}}
"""
_READ: Final = f"""{MISSING}
[ -d "$1" ] && exit {IS_DIR}
[ -e "$1" ] || missing "$1"
[ -f "$1" ] || exit {DENIED}
[ -r "$1" ] || exit {DENIED}
size=$(stat -Lc %s -- "$1") || exit {DENIED}
[ "$size" -le "$2" ] || exit {TOO_LARGE}
exec cat -- "$1"
"""
_WRITE: Final = f"""
[ -d "$1" ] && exit {IS_DIR}
if [ -e "$1" ]; then
    [ -f "$1" ] || exit {DENIED}
    [ -w "$1" ] || exit {DENIED}
    [ "$2" = new ] && exit {EXISTS}
else
    d=$(dirname -- "$1")
    if [ ! -d "$d" ]; then
        mkdir -p -- "$d" 2>/dev/null || {{
            p=$d; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done
            [ -d "$p" ] || exit {NOT_DIR}; exit {DENIED}; }}
    fi
    [ -L "$1" ] || [ -w "$d" ] || exit {DENIED}
fi
cat > "$1" || exit {DENIED}
"""
_FIELDS: Final = r"%p\0%y\0%Y\0%s\0%m\0%T@\0%u\0%g\0%l\0"
_LIST: Final = f"""{MISSING}
[ -e "$1" ] || missing "$1"
if [ "$2" = below ]; then
    [ -d "$1" ] || exit {NOT_DIR}
    [ -r "$1" ] && [ -x "$1" ] || exit {DENIED}
    exec find "$1/" -mindepth 1 -maxdepth "$3" -printf '{_FIELDS}'
fi
exec find "$1" -maxdepth 0 -printf '{_FIELDS}'
"""
_REMOVE: Final = f"""{MISSING}
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
if [ -d "$1" ] && [ ! -L "$1" ]; then
    if [ "$2" = all ]; then rm -rf -- "$1" || exit {DENIED}; exit 0; fi
    [ -z "$(ls -A -- "$1")" ] || exit {NOT_EMPTY}
    rmdir -- "$1" || exit {DENIED}
else
    rm -f -- "$1" || exit {DENIED}
fi
"""
_MAKE_DIR: Final = f"""
[ -d "$1" ] && exit 0
[ -e "$1" ] && exit {EXISTS}
mkdir -p -- "$1" 2>/dev/null && exit 0
p=$1; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done
[ -d "$p" ] || exit {NOT_DIR}
exit {DENIED}
"""
_RENAME: Final = f"""{MISSING}
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
mkdir -p -- "$(dirname -- "$2")" 2>/dev/null
mv -T -- "$1" "$2" || exit {DENIED}
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory."""

    path: str
    kind: str
    """``f``, ``d``, ``l`` or another letter of find(1), of the entry itself."""
    target_kind: str
    """The same after links were followed; ``N`` for a dangling link, ``L`` for a loop."""
    size: int
    mode: int
    mtime: float
    user: str
    group: str
    link: str
    """The target of a link; empty for others."""

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory or a link to one."""
        return self.target_kind == "d"


async def script(session: Session, text: str, *arguments: str, stdin: bytes | None = None) -> bytes:
    """Run a script inside; raise the builtin error that its exit code stands for."""
    path = arguments[0]
    if "\0" in path:
        raise ValueError("a path cannot contain a null character")
    process = await session.run(
        ["/bin/sh", "-c", text, "sh", *arguments], stdin=stdin, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate(max_output_bytes=MAX_BYTES + 1)
    code = process.returncode
    if code in _ERRORS:
        kind, number = _ERRORS[code]
        raise kind(number, os.strerror(number), path)
    if code != 0:
        message = err.decode("utf-8", "replace").strip()[-500:]
        raise OSError(errno.EIO, message or f"ended with {code}", path)
    return out


def _local(path: str) -> str:
    """Return the path in a form that no tool takes for an option."""
    return path if path.startswith("/") else f"./{path}"


async def read(session: Session, path: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file."""
    return await script(session, _READ, _local(path), str(min(max_bytes, MAX_BYTES)))


async def write(session: Session, path: str, data: bytes, *, is_new: bool = False) -> None:
    """Write a file in place, through a link; missing directories are created."""
    await script(session, _WRITE, _local(path), "new" if is_new else "any", stdin=bytes(data))


async def listing(session: Session, path: str, *, depth: int = 1) -> list[Entry]:
    """Return the entries of a directory, sorted; with ``depth`` 0, the entry itself."""
    where = "below" if depth else "itself"
    out = await script(session, _LIST, _local(path), where, str(max(depth, 1)))
    fields = out.decode("utf-8", "surrogateescape").split("\0")[:-1]
    found = []
    for at in range(0, len(fields) - 8, 9):
        name, kind, target, size, mode, mtime, user, group, link = fields[at : at + 9]
        name = name.replace("//", "/")
        if not path.startswith("/"):
            name = name.removeprefix("./")
        found.append(
            Entry(name, kind, target, int(size), int(mode, 8), float(mtime), user, group, link)
        )
    return sorted(found, key=lambda entry: entry.path)


async def exists(session: Session, path: str) -> bool:
    """Return whether a path exists, after links were followed."""
    return (await session.exec(["test", "-e", _local(path)])).returncode == 0


async def make_dir(session: Session, path: str) -> None:
    """Create a directory with its parents. Succeeds if it already exists."""
    await script(session, _MAKE_DIR, _local(path))


async def remove(session: Session, path: str, *, recursive: bool = False) -> None:
    """Remove a file, a link (not its target) or a directory."""
    await script(session, _REMOVE, _local(path), "all" if recursive else "one")


async def rename(session: Session, path: str, new_path: str) -> None:
    """Rename a file, a link or a directory; an existing file is replaced."""
    await script(session, _RENAME, _local(path), _local(new_path))
