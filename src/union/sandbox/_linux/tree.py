"""File work in a work dir whose content is hostile, and may change at this very moment.

Rules of this file:

- Every name is resolved below one directory descriptor, held since the session opened, and no
  link is followed anywhere in it (see ``openat2``).
- Nothing waits: files are opened non-blocking and must be regular before a byte is read.
- Content is never written to a file that was there before (see ``_files/writer``).
- Names are bytes below this layer: UTF-8, with ``surrogateescape`` for what is not.

All methods block, and may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from typing import TYPE_CHECKING, Final

from union.sandbox import constants
from union.sandbox._core.file_errors import (
    SandboxFileNotFoundError,
    SandboxNotADirectoryError,
    translate_os_errors,
)
from union.sandbox._core.paths import shown_path
from union.sandbox._files.listing import file_info, list_entries
from union.sandbox._files.reader import FileReader, read_whole
from union.sandbox._files.writer import FileWriter, Owner, as_byte_view, make_temporary_name
from union.sandbox._linux.descriptors import path_of
from union.sandbox._linux.held_names import HeldNames
from union.sandbox._linux.openat2 import PIN_DIR, open_beneath, rename_noreplace
from union.sandbox._linux.removal import refuse_kept, remove_entry
from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import ReadableBuffer

    from union.sandbox._core.files import FileInfo
    from union.sandbox._linux.held_names import Mark

__all__ = ["WorkTree"]

_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY

_DIR_MODE: Final = 0o755


class WorkTree:
    """The work dir, pinned by a descriptor. ``close()`` it when the session ends."""

    applies_umask = False

    def __init__(self, path: str, *, fd: int | None = None) -> None:
        """Pin ``path``, which must be a directory and not a link to one.

        With ``fd``, that descriptor is the directory, and belongs to the tree from now on.
        """
        self.path = path
        self.owner: Owner | None = None
        """Who everything made here belongs to, if not this process."""
        self.kept: frozenset[tuple[int, int]] = frozenset()
        """(Device, inode) of what is never removed."""
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self._unfinished: set[FileWriter] = set()
        self._held: set[HeldNames] = set()
        if fd is not None:
            self._fd = fd
            return
        # A trailing slash would make the kernel follow a link in spite of O_NOFOLLOW.
        bare = path.rstrip("/") or "/"
        with translate_os_errors(path):
            if stat.S_ISLNK(os.stat(bare, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), bare)
            self._fd = os.open(bare, PIN_DIR | os.O_NOFOLLOW)

    def where(self) -> tuple[str, os.stat_result]:
        """Tell where the pinned directory really is, and what it is."""
        return path_of(self._fd), os.fstat(self._fd)

    def dup_root(self) -> int:
        """Return another descriptor of the directory, which the caller closes."""
        with self._root() as root:
            return os.dup(root)

    def close(self) -> None:
        """Give up files in the making, and the descriptor once no call is under way."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = self._users == 0
            held = tuple(self._held)
        for names in held:
            names.close()  # waits for a look that is under way, which uses the descriptor below
        for new in tuple(self._unfinished):
            new.abort()
        if idle:
            os.close(self._fd)

    def put(
        self, rel: str, data: ReadableBuffer, *, mode: int = 0o644, overwrite: bool = True
    ) -> int:
        """Make ``rel`` a file with this content, atomically; return the number of bytes."""
        return self.put_stream(rel, (as_byte_view(data),), mode=mode, overwrite=overwrite)

    def put_stream(
        self,
        rel: str,
        chunks: Iterable[bytes | memoryview],
        *,
        mode: int = 0o644,
        overwrite: bool = True,
    ) -> int:
        """Make ``rel`` a file of these pieces; if they end in an exception nothing is left.

        This is one call: if the tree is closed meanwhile, it is still done to its end.
        """
        writer = FileWriter(self, rel, mode=mode, overwrite=overwrite)
        try:
            return writer.put(chunks)
        except BaseException:
            writer.abort()
            raise

    def open_writer(self, rel: str, *, mode: int = 0o644, overwrite: bool = True) -> FileWriter:
        """Begin a file that is written in several calls; closing the tree gives it up."""
        writer = FileWriter(self, rel, mode=mode, overwrite=overwrite)
        self._unfinished.add(writer)
        return writer

    def writer_closed(self, writer: FileWriter) -> None:
        """Forget a file that has its name, or was given up."""
        self._unfinished.discard(writer)

    def open_reader(self, rel: str, *, max_bytes: int) -> FileReader:
        """Begin to read a file in pieces, at most ``max_bytes`` of it; opened with the first."""
        return FileReader(self, rel, max_bytes=max_bytes)

    def open_file(self, root: int, rel: str) -> int:
        """Open ``rel`` for reading; the caller closes it."""
        return open_beneath(root, _encoded(rel), flags=_READ_FILE)

    def get(self, rel: str, *, max_bytes: int) -> bytes:
        """Return the content of the regular file ``rel``, at most ``max_bytes`` of it."""
        with self.borrow_root(rel) as root:
            fd = self.open_file(root, rel)
            try:
                return read_whole(fd, rel, max_bytes=max_bytes)
            finally:
                os.close(fd)

    def list_dir(
        self, rel: str = ".", *, max_entries: int = constants.MAX_DIR_ENTRIES
    ) -> tuple[FileInfo, ...]:
        """Describe what is in the directory ``rel``, by name; links are not followed."""
        with self.borrow_root(rel) as root:
            fd = open_beneath(root, _encoded(rel), flags=_READ_DIR)
            try:
                return list_entries(fd, rel, max_entries=max_entries)
            finally:
                os.close(fd)

    def stat(self, rel: str) -> FileInfo:
        """Describe ``rel`` itself; a link as last component is described, not followed."""
        with self.borrow_root(rel) as root:
            if rel == ".":
                return file_info(rel, os.fstat(root))
            parent, leaf = self._parent(root, rel)
            try:
                return file_info(rel, os.stat(leaf, dir_fd=parent, follow_symlinks=False))
            finally:
                os.close(parent)

    def exists(self, rel: str) -> bool:
        """Say whether anything has this name, a dangling link included.

        A path that goes through a link is an error here too: no answer about it would be true.
        """
        try:
            self.stat(rel)
        except (SandboxFileNotFoundError, SandboxNotADirectoryError):
            return False
        return True

    def check_dir(self, rel: str) -> None:
        """Raise unless ``rel`` is a directory that is reached without any link."""
        with self.borrow_root(rel) as root:
            os.close(open_beneath(root, _encoded(rel), flags=PIN_DIR))

    def make_dir(self, rel: str, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Create the directory ``rel``; with ``exist_ok`` a directory of that name is fine."""
        with self.borrow_root(rel) as root:
            if rel == ".":
                if exist_ok:
                    return
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            parent, leaf = self._parent(root, rel, create=parents)
            try:
                os.close(_made_dir(parent, leaf, exist_ok=exist_ok, owner=self.owner))
            except NotADirectoryError as exc:  # a file of that name, as mkdir() reports it
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from exc
            finally:
                os.close(parent)

    def put_link(self, rel: str, target: str) -> None:
        """Make ``rel`` a link to ``target``, in place of a file or link of that name."""
        with self.borrow_root(rel) as root:
            parent, leaf = self.open_parent(root, rel)
            temporary = make_temporary_name()
            try:
                os.symlink(_encoded(target), temporary, dir_fd=parent)
                try:
                    if self.owner is not None:
                        os.chown(temporary, *self.owner, dir_fd=parent, follow_symlinks=False)
                    os.rename(temporary, leaf, src_dir_fd=parent, dst_dir_fd=parent)
                except BaseException:
                    os.unlink(temporary, dir_fd=parent)
                    raise
            finally:
                os.close(parent)

    def give_to(self, uid: int, gid: int) -> None:
        """Change the owner of everything; only while nothing hostile can reach the tree."""
        with self._root() as root:
            base = f"/proc/self/fd/{root}"
            for where, dirs, files in os.walk(base):
                for name in (*dirs, *files):
                    os.chown(f"{where}/{name}", uid, gid, follow_symlinks=False)
            os.chown(base, uid, gid)

    def names(self, rel: str, *, suffix: str, most: int) -> tuple[str, ...] | None:
        """The names in a directory that end so, sorted; none if it cannot be read.

        None if the directory holds more than ``most`` names of any kind: no more are looked at.
        """
        with self._root() as root:
            try:
                fd = open_beneath(root, _encoded(rel), flags=_READ_DIR)
            except OSError:
                return ()
            try:
                with os.scandir(fd) as entries:
                    found = [entry.name for entry in itertools.islice(entries, most + 1)]
            except OSError:
                return ()
            finally:
                os.close(fd)
        if len(found) > most:
            return None
        return tuple(sorted(name for name in found if name.endswith(suffix)))

    def fingerprint(self, names: tuple[str, ...]) -> tuple[Mark, ...] | None:
        """(inode, change time) of each name; None if one is missing, or is reached through a link.

        It tells change, nothing else.
        """
        if not names:
            return ()
        with self._root() as root:
            try:
                held = HeldNames(root, names)
            except OSError:
                return None
        held.close()
        return held.marks

    def hold(self, names: tuple[str, ...]) -> HeldNames | None:
        """Look at names as ``fingerprint()`` does and keep their directories open, to look again.

        The caller closes it, or closing the tree does.
        """
        with self._root() as root:
            try:
                held = HeldNames(root, names)
            except OSError:
                return None
            with self._lock:
                if not self._closing:
                    self._held.add(held)
                    return held
        held.close()
        return None

    def release(self, held: HeldNames) -> None:
        """Close what ``hold()`` returned."""
        held.close()
        with self._lock:
            self._held.discard(held)

    def read_link(self, rel: str) -> str:
        """Where the link ``rel`` points to; it is not followed."""
        with self.borrow_root(rel) as root:
            parent, leaf = self._parent(root, rel)
            try:
                return _decoded(os.readlink(leaf, dir_fd=parent))
            finally:
                os.close(parent)

    def remove(self, rel: str, *, recursive: bool = False) -> None:
        """Remove ``rel``: a file, a link (not what it points to), or a directory.

        A directory that is not empty needs ``recursive``.
        """
        if rel == ".":
            msg = "rel='.' is the work dir itself; it is removed when its session closes"
            raise SandboxUsageError(msg, argument="rel")
        with self.borrow_root(rel) as root:
            parent, leaf = self._parent(root, rel)
            try:
                found = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
                refuse_kept(found, self.kept, shown=rel)
                if not stat.S_ISDIR(found.st_mode):
                    os.unlink(leaf, dir_fd=parent)
                elif recursive:
                    remove_entry(parent, leaf, shown=rel, kept=self.kept)
                else:
                    os.rmdir(leaf, dir_fd=parent)
            finally:
                os.close(parent)

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """Lend the descriptor. It is not closed, nor its number reused, while it is lent."""
        with self._lock:
            if self._closing:
                msg = f"the work dir {shown_path(self.path)} is closed"
                raise SessionClosedError(msg)
            self._users += 1
        try:
            yield self._fd
        finally:
            self._give_back()

    @contextlib.contextmanager
    def borrow_root(self, rel: str) -> Iterator[int]:
        """Lend the root descriptor for work on ``rel``; translate its errors."""
        with self._root() as root, translate_os_errors(rel):
            yield root

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            os.close(self._fd)

    def shown(self, rel: str) -> str:
        """How a path is shown in an error: as the caller gave it."""
        return rel

    def open_parent(self, root: int, rel: str) -> tuple[int, bytes]:
        """Open the directory that holds ``rel``, made if need be; the caller closes it."""
        return self._parent(root, rel, create=True)

    def rename_new(self, dir_fd: int, source: bytes, target: bytes) -> None:
        """Rename within one directory, unless the new name is taken."""
        rename_noreplace(dir_fd, source, target)

    def _parent(self, root: int, rel: str, *, create: bool = False) -> tuple[int, bytes]:
        """Open the directory that holds ``rel``; the caller closes it."""
        above, _, leaf = _encoded(rel).rpartition(b"/")
        if leaf in {b"", b".", b".."}:
            msg = f"rel={rel!r} does not name a file below the work dir"
            raise SandboxUsageError(msg, argument="rel")
        try:
            return open_beneath(root, above or b".", flags=PIN_DIR), leaf
        except FileNotFoundError:
            if not create:
                raise
        at = open_beneath(root, b".", flags=PIN_DIR)
        for name in above.split(b"/"):
            try:
                below = _made_dir(at, name, exist_ok=True, owner=self.owner)
            finally:
                os.close(at)
            at = below
        return at, leaf


def _made_dir(parent: int, name: bytes, *, exist_ok: bool, owner: Owner | None) -> int:
    """Create a directory unless it is there, and open it; the caller closes it."""
    try:
        os.mkdir(name, _DIR_MODE, dir_fd=parent)
    except FileExistsError:
        if not exist_ok:
            raise
        return open_beneath(parent, name, flags=PIN_DIR)
    # By now another directory of the same tree may have the name: no harm, it is as much the
    # sandbox's own. A link is refused.
    fd = open_beneath(parent, name, flags=_READ_DIR)
    try:
        if owner is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, _DIR_MODE)  # mkdir obeys the umask of the caller's process
    except OSError:
        os.close(fd)
        raise
    return fd


def _encoded(rel: str) -> bytes:
    return rel.encode("utf-8", "surrogateescape")


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
