"""Names below a directory, compared with how they were when they were looked at first.

Each directory is opened from the one above it and kept open, so that no link is followed, whatever
is exchanged meanwhile. Later, one stat call per name tells whether it is still the same. A
directory that is kept open has an inode number that no other directory can get. So if the name of
a directory has its number, the descriptor is that directory, and its names can be compared next.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Final

from union.sandbox._linux.openat2 import PIN_DIR

__all__ = ["HeldNames", "Mark"]

Mark = tuple[int, int]
"""Inode and change time."""
_PIN_DIR_ITSELF: Final = PIN_DIR | os.O_NOFOLLOW


class HeldNames:
    """The marks of some names, and their directories, open. Any thread may use it."""

    __slots__ = ("_fds", "_lock", "_seen", "marks")

    def __init__(self, root: int, names: tuple[str, ...]) -> None:
        """Look at ``names`` below ``root``, a directory that stays open until ``close()``.

        Raises:
            OSError: one is missing, or is reached through a link.

        """
        steps, slots = _walk_of(names)
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._seen: list[tuple[int, str, int, int]] = []
        """Where each name is looked up, and what was found there, from the top."""
        parents = [root]
        try:
            for parent, leaf, is_parent in steps:
                at = parents[parent]
                if is_parent:
                    fd = os.open(leaf, _PIN_DIR_ITSELF, dir_fd=at)
                    self._fds.append(fd)
                    parents.append(fd)
                    found = os.fstat(fd)
                else:
                    found = os.lstat(leaf, dir_fd=at)
                self._seen.append((at, leaf, found.st_ino, found.st_ctime_ns))
        except BaseException:
            self.close()
            raise
        self.marks: tuple[Mark, ...] = tuple([self._seen[slot][2:] for slot in slots])

    def is_unchanged(self) -> bool:
        """Return whether every name has the marks that it had; False once closed."""
        with self._lock:  # no descriptor is closed meanwhile, nor its number reused
            try:
                for parent, leaf, inode, changed in self._seen:
                    found = os.lstat(leaf, dir_fd=parent)
                    # A directory whose name refers to something else is not searched further.
                    if found.st_ino != inode or found.st_ctime_ns != changed:
                        return False
            except OSError:
                return False
            return bool(self._seen)

    def close(self) -> None:
        """Close the directories; a second call does nothing."""
        with self._lock:
            self._seen = []
            while self._fds:
                os.close(self._fds.pop())


@functools.lru_cache(maxsize=64)
def _walk_of(names: tuple[str, ...]) -> tuple[tuple[tuple[int, str, bool], ...], tuple[int, ...]]:
    """How to reach these names, each directory from the one above it.

    Returns the steps (number of the parent among the directories that are open, one component,
    whether it is opened), and for each name the step that meets it.
    """
    parents = {name.rpartition("/")[0] for name in names}
    every = {"/".join(p.split("/")[: k + 1]) for p in parents if p for k in range(p.count("/") + 1)}
    opened, met = {"": 0}, dict[str, int]()
    steps: list[tuple[int, str, bool]] = []
    for name in sorted({*every, *names}, key=lambda n: (n.count("/"), n)):
        above, _, leaf = name.rpartition("/")
        met[name] = len(steps)
        steps.append((opened[above], leaf, name in every))
        if name in every:
            opened[name] = len(opened)
    return tuple(steps), tuple(met[name] for name in names)
