"""Compare two trees whose content is hostile: what was added, changed and deleted.

Both trees are named by descriptors, and no link is followed in them. With layers, only the names
that appear in the layers of one side alone are compared: the cost is that of the changes, not of
the tree. The layers are only read for their names; the kernel's own view of both sides decides.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from union.sandbox._checkpoints.values import TreeChange
from union.sandbox._core.file_errors import SandboxFileTooLargeError
from union.sandbox._files.listing import file_info
from union.sandbox._linux.openat2 import PIN_DIR, open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["TreeComparison"]

_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY
_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_MARKS: Final = tuple(
    f"{space}.overlay.{name}" for space in ("user", "trusted") for name in ("opaque", "redirect")
)
MAX_CHANGES: Final = 200_000
MAX_TEXT: Final = 256 * 1024
"""The largest file that is compared as text."""
MAX_TEXTS: Final = 64 * 1024 * 1024
"""Characters of all differences together; files after that have none."""
_CHUNK: Final = 1 << 20


class TreeComparison:
    """One comparison. ``run()`` blocks."""

    def __init__(
        self,
        old: int,
        new: int,
        *,
        layers: Sequence[str] | None,
        content: bool,
        skip: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Compare the directories ``old`` and ``new``.

        Args:
            old: descriptor of the tree as it was.
            new: descriptor of the tree as it is.
            layers: directories whose names may differ; None to compare everything.
            content: whether to add the difference of small text files.
            skip: returns whether a path is left out.

        """
        self._old = old
        self._new = new
        self._layers = layers
        self._content = content
        self._skip = skip
        self._found: list[TreeChange] = []
        self._room = MAX_TEXTS

    def run(self) -> tuple[TreeChange, ...]:
        """Return the changes, sorted by path."""
        pending: list[tuple[str, bool]] = [("", self._layers is None)]
        while pending:
            where, everything = pending.pop()
            for name in self._names(where, everything=everything):
                path = f"{where}/{name}" if where else name
                if self._compare(path):
                    pending.append((path, everything or self._is_replaced(path)))
        return tuple(sorted(self._found, key=lambda change: change.path))

    def _compare(self, path: str) -> bool:
        """Record the difference at one path; return whether to descend into it."""
        old, new = _stat(self._old, path), _stat(self._new, path)
        if old is None and new is None:
            return False
        if old is None or new is None or stat.S_IFMT(old.st_mode) != stat.S_IFMT(new.st_mode):
            self._record(path, old, new)
            # Whatever is below one side only is a change of its own.
            if old is not None and stat.S_ISDIR(old.st_mode):
                self._record_below(path, self._old, is_old=True)
            if new is not None and stat.S_ISDIR(new.st_mode):
                self._record_below(path, self._new, is_old=False)
            return False
        if stat.S_ISDIR(old.st_mode):
            if stat.S_IMODE(old.st_mode) != stat.S_IMODE(new.st_mode):
                self._record(path, old, new)
            return True
        if self._differs(path, old, new):
            self._record(path, old, new)
        return False

    def _differs(self, path: str, old: os.stat_result, new: os.stat_result) -> bool:
        if stat.S_IMODE(old.st_mode) != stat.S_IMODE(new.st_mode):
            return True
        if stat.S_ISLNK(old.st_mode):
            return _link(self._old, path) != _link(self._new, path)
        if not stat.S_ISREG(old.st_mode):
            return old.st_rdev != new.st_rdev
        if old.st_size != new.st_size:
            return True
        if (old.st_dev, old.st_ino, old.st_ctime_ns) == (new.st_dev, new.st_ino, new.st_ctime_ns):
            return False
        return not _has_same_bytes(self._old, self._new, path)

    def _record_below(self, path: str, root: int, *, is_old: bool) -> None:
        pending = [path]
        while pending:
            where = pending.pop()
            for name in _list(root, where):
                below = f"{where}/{name}"
                found = _stat(root, below)
                if found is None:
                    continue
                self._record(below, found if is_old else None, None if is_old else found)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(below)

    def _record(self, path: str, old: os.stat_result | None, new: os.stat_result | None) -> None:
        if self._skip(path):
            return
        if len(self._found) >= MAX_CHANGES:
            raise SandboxFileTooLargeError(
                f"there are more than {MAX_CHANGES} changes", path=path, code="too-many-changes"
            )
        shown = os.fsencode(path).decode("utf-8", "surrogateescape")
        now = new or old
        if now is None:
            return
        info = file_info(shown, now)
        before = None if old is None else file_info(shown, old)
        action = "added" if old is None else "deleted" if new is None else "changed"
        self._found.append(
            TreeChange(
                path=shown,
                action=action,  # type: ignore[arg-type]
                kind=info.kind,
                size=info.size,
                mode=info.mode,
                old_kind=None if before is None else before.kind,
                old_size=None if before is None else before.size,
                old_mode=None if before is None else before.mode,
                text=self._text(path, old, new) if self._content else None,
            )
        )

    def _text(
        self, path: str, old: os.stat_result | None, new: os.stat_result | None
    ) -> str | None:
        if not any(found is not None and stat.S_ISREG(found.st_mode) for found in (old, new)):
            return None
        if self._room <= 0:
            return None
        before, after = _lines(self._old, path, old), _lines(self._new, path, new)
        if before is None or after is None:
            return None
        shown = os.fsencode(path).decode("utf-8", "replace")
        lines = difflib.unified_diff(
            before,
            after,
            "/dev/null" if old is None else f"a/{shown}",
            "/dev/null" if new is None else f"b/{shown}",
        )
        text = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )
        self._room -= len(text)
        return text

    # Layers.

    def _names(self, where: str, *, everything: bool) -> set[str]:
        if everything or self._layers is None:
            return {*_list(self._old, where), *_list(self._new, where)}
        names: set[str] = set()
        for fd in self._open_layers(where):
            with os.scandir(fd) as entries:
                names.update(entry.name for entry in entries)
        return names

    def _is_replaced(self, path: str) -> bool:
        """Return whether a layer hides what the layers below have under this name."""
        for layer in self._layers or ():
            with contextlib.ExitStack() as opened:
                top = os.open(layer, PIN_DIR)
                opened.callback(os.close, top)
                found = _stat(top, path)
                if found is None:
                    continue
                if not stat.S_ISDIR(found.st_mode):
                    return True
                try:
                    fd = open_beneath(top, os.fsencode(path), flags=_READ_DIR)
                except OSError:
                    return True
                opened.callback(os.close, fd)
                if any(map(_has_mark, (fd,) * len(_MARKS), _MARKS)):
                    return True
        return False

    def _open_layers(self, where: str) -> Iterator[int]:
        for layer in self._layers or ():
            top = os.open(layer, PIN_DIR)
            try:
                fd = open_beneath(top, os.fsencode(where) or b".", flags=_READ_DIR)
            except OSError:
                continue  # this layer has no such directory
            finally:
                os.close(top)
            try:
                yield fd
            finally:
                os.close(fd)


def _has_mark(fd: int, name: str) -> bool:
    try:
        return bool(os.getxattr(fd, name))
    except OSError:
        return False


def _open(root: int, path: str, flags: int) -> int | None:
    try:
        return open_beneath(root, os.fsencode(path) or b".", flags=flags)
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        return None


def _stat(root: int, path: str) -> os.stat_result | None:
    above, _, leaf = path.rpartition("/")
    parent = _open(root, above, PIN_DIR)
    if parent is None:
        return None
    try:
        return os.stat(leaf, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return None
    finally:
        os.close(parent)


def _link(root: int, path: str) -> str | None:
    above, _, leaf = path.rpartition("/")
    parent = _open(root, above, PIN_DIR)
    if parent is None:
        return None
    try:
        return os.readlink(leaf, dir_fd=parent)
    except OSError:
        return None
    finally:
        os.close(parent)


def _list(root: int, where: str) -> list[str]:
    fd = _open(root, where, _READ_DIR)
    if fd is None:
        return []
    try:
        with os.scandir(fd) as entries:
            return [entry.name for entry in entries]
    finally:
        os.close(fd)


def _has_same_bytes(old_root: int, new_root: int, path: str) -> bool:
    with contextlib.ExitStack() as opened:
        fds = []
        for root in (old_root, new_root):
            fd = _open(root, path, _READ_FILE)
            if fd is None:
                return False
            opened.callback(os.close, fd)
            fds.append(fd)
        while True:
            one, other = (os.read(fd, _CHUNK) for fd in fds)
            if one != other:
                return False
            if not one:
                return True


def _lines(root: int, path: str, found: os.stat_result | None) -> list[str] | None:
    """Return the lines of a small text file, none for a missing one; None for any other."""
    if found is None:
        return []
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_TEXT:
        return None
    fd = _open(root, path, _READ_FILE)
    if fd is None:
        return None
    try:
        data = os.read(fd, MAX_TEXT + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_TEXT or b"\0" in data:
        return None
    try:
        return data.decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
