"""File work in a work dir whose content is hostile, and may change at this very moment.

Rules of this file:

- Every name is resolved below one directory descriptor, held since the session opened, and no
  link is followed anywhere in it (see ``beneath``).
- Nothing waits: files are opened non-blocking and must be regular before a byte is read.
- Content is never written to a file that was there before: it goes to a new file, which then
  takes the name. So a hard link or a second descriptor keeps the old content.
- Names are bytes below this layer: UTF-8, with ``surrogateescape`` for what is not.

All methods block, and may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import (
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxNotADirectoryError,
)
from union.sandbox._core.paths import FileInfo, FileKind, shown_path
from union.sandbox._linux.beneath import open_beneath, rename_noreplace
from union.sandbox._linux.refusals import not_a_file, too_large, translated
from union.sandbox._linux.removal import remove_entry, remove_tree
from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import ReadableBuffer

__all__ = ["FileInfo", "WorkTree", "remove_tree"]

_READ_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_READ_DIR: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY
_PIN_DIR: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_PIECE: Final = 64 * 1024
_MOST_PER_CALL: Final = 1024 * 1024 * 1024  # one read or write moves a little under 2 GiB
_MAX_ENTRIES: Final = 100_000
_DIR_MODE: Final = 0o755

Owner = tuple[int, int]


class WorkTree:
    """The work dir, pinned by a descriptor. ``close()`` it when the session ends."""

    def __init__(self, path: str) -> None:
        """Pin ``path``, which must be a directory and not a link to one."""
        self.path = path
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        # A trailing slash would make the kernel follow a link in spite of O_NOFOLLOW.
        bare = path.rstrip("/") or "/"
        with translated(path):
            if stat.S_ISLNK(os.stat(bare, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), bare)
            self._fd = os.open(bare, _PIN_DIR | os.O_NOFOLLOW)

    def close(self) -> None:
        """Let go of the descriptor, once the calls that are under way have ended."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = self._users == 0
        if idle:
            os.close(self._fd)

    def put(
        self,
        rel: str,
        data: ReadableBuffer,
        *,
        mode: int = 0o644,
        overwrite: bool = True,
        owner: Owner | None = None,
    ) -> int:
        """Make ``rel`` a file with this content, atomically; return the number of bytes."""
        return self.put_stream(rel, (_bytes_of(data),), mode=mode, overwrite=overwrite, owner=owner)

    def put_stream(
        self,
        rel: str,
        chunks: Iterable[bytes | memoryview],
        *,
        mode: int = 0o644,
        overwrite: bool = True,
        owner: Owner | None = None,
    ) -> int:
        """Make ``rel`` a file of these pieces; if they end in an exception nothing is left."""
        _check_mode(mode)
        with self._root() as root, translated(rel):
            parent, leaf = self._parent(root, rel, create=True, owner=owner)
            try:
                _check_target(parent, leaf, rel=rel, overwrite=overwrite)
                return _write_new(
                    parent, leaf, chunks, rel=rel, mode=mode, overwrite=overwrite, owner=owner
                )
            finally:
                os.close(parent)

    def get(self, rel: str, *, max_bytes: int) -> bytes:
        """Return the content of the regular file ``rel``, at most ``max_bytes`` of it."""
        with self._root() as root, translated(rel):
            fd = open_beneath(root, _encoded(rel), flags=_READ_FILE)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise not_a_file(found.st_mode, rel)
                # Sparse files lie about their size for free; memory is what would be used up.
                if found.st_size > min(max_bytes, _machine_memory()):
                    raise too_large(rel, size=found.st_size, max_bytes=max_bytes)
                return _read_all(fd, rel, expected=found.st_size, max_bytes=max_bytes)
            finally:
                os.close(fd)

    def list_dir(self, rel: str = ".", *, max_entries: int = _MAX_ENTRIES) -> tuple[FileInfo, ...]:
        """Describe what is in the directory ``rel``, by name; links are not followed."""
        prefix = "" if rel == "." else f"{rel}/"
        infos: list[FileInfo] = []
        with self._root() as root, translated(rel):
            fd = open_beneath(root, _encoded(rel), flags=_READ_DIR)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if len(infos) >= max_entries:
                            msg = f"{shown_path(rel)} has more than {max_entries} entries"
                            raise SandboxFileTooLargeError(msg, path=rel, code="too-many-entries")
                        # Gone since it was listed: then it is not in the directory.
                        with contextlib.suppress(FileNotFoundError):
                            found = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                            infos.append(_info(prefix + _decoded(os.fsencode(entry.name)), found))
            finally:
                os.close(fd)
        return tuple(sorted(infos, key=lambda info: info.path))

    def stat(self, rel: str) -> FileInfo:
        """Describe ``rel`` itself; a link as last component is described, not followed."""
        with self._root() as root, translated(rel):
            if rel == ".":
                return _info(rel, os.fstat(root))
            parent, leaf = self._parent(root, rel)
            try:
                return _info(rel, os.stat(leaf, dir_fd=parent, follow_symlinks=False))
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
        with self._root() as root, translated(rel):
            os.close(open_beneath(root, _encoded(rel), flags=_PIN_DIR))

    def make_dir(
        self, rel: str, *, parents: bool = False, exist_ok: bool = False, owner: Owner | None = None
    ) -> None:
        """Create the directory ``rel``; with ``exist_ok`` a directory of that name is fine."""
        with self._root() as root, translated(rel):
            if rel == ".":
                if exist_ok:
                    return
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            parent, leaf = self._parent(root, rel, create=parents, owner=owner)
            try:
                os.close(_made_dir(parent, leaf, exist_ok=exist_ok, owner=owner))
            finally:
                os.close(parent)

    def put_link(self, rel: str, target: str, *, owner: Owner | None = None) -> None:
        """Make ``rel`` a link to ``target``, in place of a file or link of that name."""
        with self._root() as root, translated(rel):
            parent, leaf = self._parent(root, rel, create=True, owner=owner)
            temporary = b".put-" + secrets.token_hex(12).encode()
            try:
                os.symlink(_encoded(target), temporary, dir_fd=parent)
                try:
                    if owner is not None:
                        os.chown(temporary, *owner, dir_fd=parent, follow_symlinks=False)
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

    def names(self, rel: str, *, suffix: str) -> tuple[str, ...]:
        """The names in a directory that end so, sorted; none if it cannot be read."""
        with self._root() as root:
            try:
                fd = open_beneath(root, _encoded(rel), flags=_READ_DIR)
            except OSError:
                return ()
            try:
                return tuple(sorted(name for name in os.listdir(fd) if name.endswith(suffix)))
            finally:
                os.close(fd)

    def fingerprint(self, names: tuple[str, ...]) -> tuple[tuple[int, int], ...] | None:
        """(inode, change time) of each name; None if one is missing. Tells change, nothing else."""
        with self._root() as root:
            try:
                found = [os.stat(name, dir_fd=root, follow_symlinks=False) for name in names]
            except OSError:
                return None
            return tuple((one.st_ino, one.st_ctime_ns) for one in found)

    def read_link(self, rel: str) -> str:
        """Where the link ``rel`` points to; it is not followed."""
        with self._root() as root, translated(rel):
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
        with self._root() as root, translated(rel):
            parent, leaf = self._parent(root, rel)
            try:
                if not stat.S_ISDIR(os.stat(leaf, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.unlink(leaf, dir_fd=parent)
                elif recursive:
                    remove_entry(parent, leaf, shown=rel)
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

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            os.close(self._fd)

    def _parent(
        self, root: int, rel: str, *, create: bool = False, owner: Owner | None = None
    ) -> tuple[int, bytes]:
        """Open the directory that holds ``rel``; the caller closes it."""
        above, _, leaf = _encoded(rel).rpartition(b"/")
        if leaf in {b"", b".", b".."}:
            msg = f"rel={rel!r} does not name a file below the work dir"
            raise SandboxUsageError(msg, argument="rel")
        try:
            return open_beneath(root, above or b".", flags=_PIN_DIR), leaf
        except FileNotFoundError:
            if not create:
                raise
        at = open_beneath(root, b".", flags=_PIN_DIR)
        for name in above.split(b"/"):
            try:
                below = _made_dir(at, name, exist_ok=True, owner=owner)
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
        return open_beneath(parent, name, flags=_PIN_DIR)
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


def _write_new(
    parent: int,
    leaf: bytes,
    chunks: Iterable[bytes | memoryview],
    *,
    rel: str,
    mode: int,
    overwrite: bool,
    owner: Owner | None,
) -> int:
    temporary = b".put-" + secrets.token_hex(12).encode()
    fd = os.open(temporary, _NEW_FILE, 0o600, dir_fd=parent)
    try:
        try:
            written = sum(_write_all(fd, chunk) for chunk in chunks)
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        if overwrite:
            # Once more: a link that came since is refused, not replaced. A later one is replaced,
            # and what it points to is not touched either way.
            _check_target(parent, leaf, rel=rel, overwrite=True)
            os.rename(temporary, leaf, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            rename_noreplace(parent, temporary, leaf)
    except BaseException:
        # The sandbox may have taken the name away or put a directory there; that is its own then.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(temporary, dir_fd=parent)
        raise
    return written


def _write_all(fd: int, chunk: bytes | memoryview) -> int:
    rest = memoryview(chunk)
    size = len(rest)
    while rest:
        rest = rest[os.write(fd, rest[:_MOST_PER_CALL]) :]
    return size


def _read_all(fd: int, rel: str, *, expected: int, max_bytes: int) -> bytes:
    """Read to the end. A file that grows meanwhile is followed, but never past the limit."""
    pieces: list[bytes] = []
    total = 0
    while True:
        # One byte more than there should be: whether the file ends there shows at once, and the
        # usual file arrives in one piece that is returned as it is.
        ask = min(max(expected - total + 1, _PIECE), max_bytes - total + 1, _MOST_PER_CALL)
        piece = os.read(fd, ask)
        if not piece:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.append(piece)
        total += len(piece)
        if total > max_bytes:
            raise too_large(rel, size=total, max_bytes=max_bytes)


def _check_target(parent: int, leaf: bytes, *, rel: str, overwrite: bool) -> None:
    try:
        found = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), leaf)
    if not stat.S_ISREG(found.st_mode):
        raise not_a_file(found.st_mode, rel)
    if not overwrite:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), leaf)


def _check_mode(mode: object) -> None:
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o777:
        shown = oct(mode) if isinstance(mode, int) else repr(mode)
        msg = f"mode={shown} is not accepted; permission bits from 0o000 to 0o777 are"
        raise SandboxUsageError(
            msg, argument="mode", hint="set-user-id, set-group-id and sticky bits cannot be put"
        )


def _bytes_of(data: object) -> memoryview:
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # the question is whether it is one
    except TypeError:
        msg = f"data must be bytes-like, not {type(data).__name__}"
        hint = "encode it first: data.encode()" if isinstance(data, str) else ""
        raise SandboxUsageError(msg, argument="data", hint=hint) from None
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


def _info(path: str, found: os.stat_result) -> FileInfo:
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


def _encoded(rel: str) -> bytes:
    return rel.encode("utf-8", "surrogateescape")


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


@functools.cache
def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
