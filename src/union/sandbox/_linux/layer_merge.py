"""Merge several layers of overlayfs into one directory that shows the same files.

Rules of this file:

- The layers were written by the kernel, are not written any more, and are only read here.
- Every mark of overlayfs that is not understood refuses the merge: the layers stay as they are.
- No link is followed. What the layers below show is decided by the kernel's own view of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.openat2 import PIN_DIR, open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LayerMerge", "MergeRefusedError", "TreeCost", "cost_of"]

_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY
_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT: Final = stat.S_IFCHR
"""Mode of a device 0:0, which deletes a name of the layers below."""
_CHUNK: Final = 1 << 20
_DROPPED: Final = frozenset({"origin", "impure", "nlink", "upper", "uuid"})
"""Marks that only say where a file came from: inode numbers may change at a checkpoint."""
_COPIED: Final = ("user.", "system.posix_acl_")
_IGNORED: Final = frozenset({"security.selinux"})
"""Attributes that the host gives to each new file."""
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class MergeRefusedError(OSError):
    """These layers cannot be merged exactly."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EOPNOTSUPP, reason)


@dataclass(frozen=True, slots=True)
class TreeCost:
    """Number and size of the entries of a layer."""

    entries: int = 0
    size: int = 0

    def __add__(self, other: TreeCost) -> TreeCost:
        return TreeCost(self.entries + other.entries, self.size + other.size)

    def fits(self, limit: TreeCost) -> bool:
        return self.entries <= limit.entries and self.size <= limit.size


def cost_of(layer: str, limit: TreeCost) -> TreeCost:
    """Return the cost of copying a layer; counting ends when ``limit`` is exceeded."""
    entries = size = 0
    with _opened(os.open(layer, _READ_DIR | os.O_NOFOLLOW | os.O_CLOEXEC)) as top:
        pending = [b"."]
        while pending and TreeCost(entries, size).fits(limit):
            path = pending.pop()
            with _opened(open_beneath(top, path, flags=_READ_DIR)) as fd:
                for name in _names(fd):
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    entries += 1
                    size += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        pending.append(path + b"/" + name)
    return TreeCost(entries, size)


@dataclass(frozen=True, slots=True)
class _Found:
    """An entry of one layer."""

    layer: int
    parent: int
    """Descriptor of the directory that has it."""
    name: bytes
    status: os.stat_result

    @property
    def path(self) -> bytes:
        return b"/proc/self/fd/%d/%b" % (self.parent, self.name)

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.status.st_mode) and self.status.st_rdev == 0


class LayerMerge:
    """One merge. ``run()`` blocks; what it has made is incomplete if it raises."""

    def __init__(
        self,
        layers: Sequence[str],
        target: str,
        *,
        below: int,
        marks: str,
        limit: TreeCost,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Merge ``layers`` into the empty directory ``target``.

        Args:
            layers: directories, the topmost first.
            target: a directory that no other process uses.
            below: descriptor of what the layers below these show.
            marks: prefix of the attributes that overlayfs keeps its marks in.
            limit: the most that is copied.
            pause: called before each entry; an error that it raises ends the merge.

        """
        self._layers = layers
        self._target = target
        self._below = below
        self._marks = marks
        self._limit = limit
        self._pause = pause
        self._is_root = os.geteuid() == 0
        self._copied = TreeCost()
        self._linked: dict[tuple[int, int], bytes] = {}
        """First path of a file with several links, by layer and inode."""
        self._pending: list[tuple[bytes, list[int], bool]] = []
        self._made: list[tuple[bytes, int]] = []
        """Directories, and the layer whose attributes they get."""

    def run(self) -> None:
        """Merge; raises an OSError if it is not possible."""
        with contextlib.ExitStack() as opened:
            flags = _READ_DIR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._tops = [opened.enter_context(_opened(os.open(p, flags))) for p in self._layers]
            self._into = opened.enter_context(_opened(os.open(self._target, flags)))
            for top in self._tops:
                if self._attributes(b"/proc/self/fd/%d/." % top)[1]:
                    raise MergeRefusedError("the top of a layer hides the layers below")
            self._pending = [(b".", [*range(len(self._tops))], False)]
            self._made = [(b".", 0)]
            while self._pending:
                path, layers, is_closed = self._pending.pop()
                self._merge_directory(path, layers, is_closed=is_closed)
            # Afterwards, and from below: a directory may be closed to its owner.
            for path, layer in reversed(self._made):
                self._finish_directory(path, layer)

    def _merge_directory(self, path: bytes, layers: list[int], *, is_closed: bool) -> None:
        """Merge one directory that each of ``layers`` has.

        Args:
            path: the directory.
            layers: indexes, the topmost first.
            is_closed: whether no layer below shows through.

        """
        names: dict[bytes, list[_Found]] = {}
        with contextlib.ExitStack() as opened:
            for layer in layers:
                fd = open_beneath(self._tops[layer], path, flags=_READ_DIR)
                opened.callback(os.close, fd)
                for name in _names(fd):
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    names.setdefault(name, []).append(_Found(layer, fd, name, status))
            into = open_beneath(self._into, path, flags=_READ_DIR)
            opened.callback(os.close, into)
            for name, found in names.items():
                self._pause()
                self._merge_entry(into, path + b"/" + name, found, is_closed=is_closed)

    def _merge_entry(self, into: int, path: bytes, found: list[_Found], *, is_closed: bool) -> None:
        first = found[0]
        if first.is_whiteout:
            if not is_closed and self._is_shown_below(path):
                os.mknod(first.name, _WHITEOUT, 0, dir_fd=into)
            return
        if not stat.S_ISDIR(first.status.st_mode):
            self._copy(into, path, first)
            return
        layers, hides = [], False
        for one in found:
            if not stat.S_ISDIR(one.status.st_mode):
                hides = True
                break
            layers.append(one.layer)
            if self._attributes(one.path)[1]:
                hides = True
                break
        self._count(0)
        os.mkdir(first.name, 0o700, dir_fd=into)
        if hides and not is_closed:
            at = b"/proc/self/fd/%d/%b" % (into, first.name)
            os.setxattr(at, f"{self._marks}opaque", b"y", follow_symlinks=False)
        self._made.append((path, first.layer))
        self._pending.append((path, layers, is_closed or hides))

    def _is_shown_below(self, path: bytes) -> bool:
        above, _, name = path.rpartition(b"/")
        try:
            parent = open_beneath(self._below, above, flags=PIN_DIR)
        except OSError as exc:
            if exc.errno in _NOT_THERE:
                return False
            raise
        with _opened(parent):
            try:
                os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return False
            except OSError:
                # Sandboxed code can make its own files unreadable by forged marks. The name exists.
                return True
        return True

    # Entries.

    def _copy(self, into: int, path: bytes, found: _Found) -> None:
        """Copy a file, link, FIFO or socket."""
        status = found.status
        attributes, _ = self._attributes(found.path)
        key = (found.layer, status.st_ino)
        if status.st_nlink > 1 and key in self._linked:
            os.link(
                self._linked[key],
                found.name,
                src_dir_fd=self._into,
                dst_dir_fd=into,
                follow_symlinks=False,
            )
            return
        self._linked[key] = path
        self._count(status.st_blocks * 512)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            self._copy_file(into, found, attributes)
            return
        if kind == stat.S_IFLNK:
            os.symlink(os.readlink(found.name, dir_fd=found.parent), found.name, dir_fd=into)
        elif kind in {stat.S_IFIFO, stat.S_IFSOCK}:
            os.mknod(found.name, kind | 0o600, dir_fd=into)
        else:
            raise MergeRefusedError("a layer has a device")
        if self._is_root:
            owner = (status.st_uid, status.st_gid)
            os.chown(found.name, *owner, dir_fd=into, follow_symlinks=False)
        at = b"/proc/self/fd/%d/%b" % (into, found.name)
        for name, value in attributes:
            os.setxattr(at, name, value, follow_symlinks=False)
        if kind != stat.S_IFLNK:
            os.chmod(at, stat.S_IMODE(status.st_mode))
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(found.name, ns=times, dir_fd=into, follow_symlinks=False)

    def _copy_file(self, into: int, found: _Found, attributes: list[tuple[str, bytes]]) -> None:
        with _opened(open_beneath(found.parent, found.name, flags=_READ_FILE)) as source:
            new = os.open(found.name, _NEW_FILE, 0o600, dir_fd=into)
            with _opened(new):
                _copy_data(source, new, found.status.st_size)
                self._finish(new, found.status, attributes)

    def _finish_directory(self, path: bytes, layer: int) -> None:
        with (
            _opened(open_beneath(self._tops[layer], path, flags=_READ_DIR)) as source,
            _opened(open_beneath(self._into, path, flags=_READ_DIR)) as made,
        ):
            attributes, _ = self._attributes(b"/proc/self/fd/%d/." % source)
            self._finish(made, os.fstat(source), attributes)

    def _finish(self, fd: int, status: os.stat_result, attributes: list[tuple[str, bytes]]) -> None:
        """Give a file or directory the owner, attributes, mode and times of its source."""
        if self._is_root:
            os.fchown(fd, status.st_uid, status.st_gid)
        for name, value in attributes:
            os.setxattr(fd, name, value)
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _attributes(self, path: bytes) -> tuple[list[tuple[str, bytes]], bool]:
        """Return the attributes to copy, and whether a directory hides the layers below."""
        copied: list[tuple[str, bytes]] = []
        is_opaque = False
        for name in os.listxattr(path, follow_symlinks=False):
            mark = name.removeprefix(self._marks)
            if mark != name and not mark.startswith("overlay."):
                if mark == "opaque" and os.getxattr(path, name, follow_symlinks=False) == b"y":
                    is_opaque = True
                elif mark not in _DROPPED:
                    raise MergeRefusedError(f"a layer has the mark {name}")
            elif mark != name or name.startswith(_COPIED):
                copied.append((name, os.getxattr(path, name, follow_symlinks=False)))
            elif name not in _IGNORED:
                raise MergeRefusedError(f"a layer has the attribute {name}")
        return copied, is_opaque

    def _count(self, size: int) -> None:
        self._copied += TreeCost(1, size)
        if not self._copied.fits(self._limit):
            raise MergeRefusedError("the layers are too large")


def _names(fd: int) -> list[bytes]:
    with os.scandir(fd) as entries:
        return [os.fsencode(entry.name) for entry in entries]


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _copy_data(source: int, target: int, size: int) -> None:
    """Copy a file with its holes."""
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            chunk = os.pread(source, min(_CHUNK, end - at), at)
            if not chunk:
                raise MergeRefusedError("a file of a layer has changed")
            view = memoryview(chunk)
            while view:
                written = os.pwrite(target, view, at)
                at += written
                view = view[written:]
