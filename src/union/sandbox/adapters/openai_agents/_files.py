"""File operations of the SDK, each a short command inside the sandbox.

A path is resolved inside first and checked against the workspace and its grants. The operation then
follows no link at the end of that path, so a link that appears in between is not followed. Whatever
happens, a command inside reaches only what the sandbox shows.
"""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING, Final

from agents.sandbox.files import EntryKind, FileEntry
from agents.sandbox.types import Permissions

from union.sandbox._core.files import VENV_DIR
from union.sandbox.adapters import _files

if TYPE_CHECKING:
    from union.sandbox._session.session import Session

__all__ = [
    "NOT_A_FILE",
    "is_incomplete",
    "list_entries",
    "make_dir",
    "read",
    "remove",
    "remove_content",
    "rename",
    "resolve",
    "same_file",
    "write",
    "write_new",
]

NOT_A_FILE: Final = "Move source must be a regular file or symlink"

# Print the path that a name stands for; with "entry", without following its last component.
_RESOLVE: Final = """
if [ "$2" = entry ]; then
    d=$(dirname -- "$1"; printf .); b=$(basename -- "$1"; printf .)
    real=$(realpath -m -- "${d%??}"; printf .) || exit 1
    real=${real%??}
    printf '%s/%s' "${real%/}" "${b%??}"
else
    real=$(realpath -m -- "$1"; printf .) || exit 1
    printf '%s' "${real%??}"
fi
"""
_READ: Final = f"""{_files.MISSING}
[ -L "$1" ] && exit {_files.LINK}
[ -d "$1" ] && exit {_files.IS_DIR}
[ -e "$1" ] || missing "$1"
[ -f "$1" ] && [ -r "$1" ] || exit {_files.DENIED}
if [ "$2" = all ]; then exec cat -- "$1"; fi
exec head -c "$2" -- "$1"
"""
_PARENT: Final = f"""
d=$(dirname -- "$1")
if [ ! -d "$d" ]; then
    mkdir -p -- "$d" 2>/dev/null || {{
        p=$d; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done
        [ -d "$p" ] || exit {_files.NOT_DIR}; exit {_files.DENIED}; }}
fi
"""
_WRITE: Final = f"""
[ -L "$1" ] && exit {_files.LINK}
[ -d "$1" ] && exit {_files.IS_DIR}
if [ -e "$1" ]; then [ -f "$1" ] || exit {_files.DENIED}; fi
{_PARENT}
cat > "$1" || exit {_files.DENIED}
"""
# With noclobber, the shell creates the file exclusively.
_WRITE_NEW: Final = f"""
if [ -e "$1" ] || [ -L "$1" ]; then exit {_files.EXISTS}; fi
{_PARENT}
set -C
{{ : > "$1"; }} 2>/dev/null || {{
    if [ -e "$1" ] || [ -L "$1" ]; then exit {_files.EXISTS}; fi; exit {_files.DENIED}; }}
set +C
cat > "$1" || exit {_files.INCOMPLETE}
"""
_LIST: Final = f"""{_files.MISSING}
[ -L "$1" ] && exit {_files.LINK}
[ -e "$1" ] || missing "$1"
[ -d "$1" ] || exit {_files.NOT_DIR}
[ -r "$1" ] && [ -x "$1" ] || exit {_files.DENIED}
cd -- "$1" && exec find . -mindepth 1 -maxdepth 1 -printf '%f\\0%y\\0%s\\0%m\\0%U\\0%G\\0'
"""
_MAKE_DIR: Final = f"""{_files.MISSING}
[ -L "$1" ] && exit {_files.LINK}
[ -d "$1" ] && exit 0
[ -e "$1" ] && exit {_files.EXISTS}
if [ "$2" = parents ]; then {_PARENT}
fi
mkdir -- "$1" 2>/dev/null && exit 0
[ -d "$1" ] && exit 0
d=$(dirname -- "$1"); [ -e "$d" ] || missing "$d"; [ -d "$d" ] || exit {_files.NOT_DIR}
exit {_files.DENIED}
"""
_EMPTY: Final = f"""
if [ -d "$1" ] && [ ! -L "$1" ]; then find "$1" -mindepth 1 -delete || exit {_files.DENIED}; fi
"""
_RENAME: Final = f"""{_files.MISSING}
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
if [ ! -L "$1" ] && [ ! -f "$1" ]; then echo '{NOT_A_FILE}' >&2; exit 1; fi
exec mv -fT -- "$1" "$2"
"""
_SAME: Final = """
if [ "$3" = entry ] && { [ -L "$1" ] || [ -L "$2" ]; }; then printf 0; exit 0; fi
if [ "$1" -ef "$2" ]; then printf 1; else printf 0; fi
"""
_KINDS: Final = {"d": EntryKind.DIRECTORY, "f": EntryKind.FILE, "l": EntryKind.SYMLINK}
_FIELDS: Final = 6


async def resolve(session: Session, path: str, *, is_entry: bool) -> str:
    """Return the path inside that a name stands for; it need not exist."""
    kind = "entry" if is_entry else "target"
    found = await _files.script(session, _RESOLVE, path, kind)
    return found.decode("utf-8", "surrogateescape")


async def read(session: Session, path: str, *, max_bytes: int | None = None) -> bytes:
    """Return the content of a file, or its beginning."""
    size = "all" if max_bytes is None else str(max_bytes)
    return await _files.script(session, _READ, path, size)


async def write(session: Session, path: str, data: bytes) -> None:
    """Write a file in place; missing directories are created."""
    await _files.script(session, _WRITE, path, stdin=data)


async def write_new(session: Session, path: str, data: bytes) -> None:
    """Create a file; missing directories are created."""
    await _files.script(session, _WRITE_NEW, path, stdin=data)


def is_incomplete(error: OSError) -> bool:
    """Return whether ``write_new()`` has created the file and not written all of it."""
    return error.errno == errno.ENOSPC


async def list_entries(session: Session, path: str) -> list[FileEntry]:
    """Return the entries of a directory. Links are described, not followed."""
    out = await _files.script(session, _LIST, path)
    fields = out.decode("utf-8", "surrogateescape").split("\0")[:-1]
    found = []
    for at in range(0, len(fields) - _FIELDS + 1, _FIELDS):
        name, kind, size, mode, user, group = fields[at : at + _FIELDS]
        if name == VENV_DIR and path == session.work_dir:
            continue
        bits = int(mode, 8) | (stat.S_IFDIR if kind == "d" else 0)
        found.append(
            FileEntry(
                path=f"{path.rstrip('/')}/{name}",
                permissions=Permissions.from_mode(bits),
                owner=user,
                group=group,
                size=int(size),
                kind=_KINDS.get(kind, EntryKind.OTHER),
            )
        )
    return sorted(found, key=lambda entry: entry.path)


async def make_dir(session: Session, path: str, *, parents: bool) -> None:
    """Create a directory. Succeeds if it already exists."""
    await _files.script(session, _MAKE_DIR, path, "parents" if parents else "one")


async def remove(session: Session, path: str, *, recursive: bool) -> None:
    """Remove a file, a link (not its target) or a directory."""
    await _files.remove(session, path, recursive=recursive)


async def remove_content(session: Session, path: str) -> None:
    """Remove everything below a directory; for a file, do nothing."""
    await _files.script(session, _EMPTY, path)


async def rename(session: Session, source: str, target: str) -> None:
    """Rename a file or a link, replacing another."""
    await _files.script(session, _RENAME, source, target)


async def same_file(session: Session, left: str, right: str, *, is_entry: bool) -> bool:
    """Return whether two paths name one file; with ``is_entry``, a link is never the same."""
    kind = "entry" if is_entry else "target"
    return await _files.script(session, _SAME, left, right, kind) == b"1"
