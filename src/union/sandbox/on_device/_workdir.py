"""The work dir: a private one that is removed, or one of the caller that is kept."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._core.file_errors import SandboxPathError
from union.sandbox._core.paths import shown_path, work_path
from union.sandbox._linux import kernel
from union.sandbox._linux.owned_dir import OwnedDir, disown, sweep
from union.sandbox._linux.tree import WorkTree
from union.sandbox._linux.tree_copy import NO_SPACE
from union.sandbox._session import threads
from union.sandbox.errors import PolicyError, SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from union.sandbox.on_device._read_only import ReadOnlyPaths

__all__ = [
    "TMP_NAME",
    "WorkDir",
    "WorkPlace",
    "default_parent",
    "disk_full",
    "is_allowed",
    "make_private_dir",
    "not_allowed",
    "report_full_disk",
    "sweep_in_background",
]

_log = logging.getLogger("union.sandbox")

_RESERVED: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/tmp",  # noqa: S108 - a name, not a file
)  # fmt: skip
"""Directories with a purpose inside; a work dir may lie below one, but not replace it."""
TMP_NAME: Final = "tmp"
"""The directory for temporary files below a session's scratch directory."""
_NO_TEMPORARY: Final = "no directory for temporary files can be written"
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
"""Preferred over the system's temporary directory, since /tmp is a private tmpfs inside."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """Where private work dirs are created, and the path under which a sandbox sees its own."""

    directory: str
    shown_at: str | None = None
    allowed: tuple[str, ...] | None = None
    """Paths that a session may name, with everything below them; None means any."""


class WorkDir:
    """A directory, kept open from open to close of the session.

    ``path`` is its path inside, ``source`` its path on this host: usually the same.
    """

    def __init__(
        self,
        pinned: str | None,
        place: WorkPlace | None = None,
        *,
        shown_at: str | None = None,
    ) -> None:
        self.is_private = pinned is None
        self.has_tmp_dir = False
        """Whether the scratch directory has one for temporary files."""
        self._owned: OwnedDir | None = None
        if pinned is None:
            self._owned = make_private_dir(None if place is None else place.directory)
            path = self._owned.path
            self.path = path if place is None or place.shown_at is None else place.shown_at
        else:
            path = self.path = _validated(pinned)
        self.is_renamed = shown_at is not None
        """Whether the caller has chosen ``path``."""
        if shown_at is not None:
            self.path = shown_at
        self.scratch: str | None = None
        """A private directory of the session, of a backend that isolates on the host's root."""
        self.on_remove: Callable[[], None] | None = None
        """Removes the layers of the session, the private directory among them."""
        self._read_only: tuple[str, ...] = ()
        self._kept: ReadOnlyPaths | None = None
        self._kept_by_calls: list[ReadOnlyPaths] = []
        self.allowed = None if place is None else place.allowed
        self.source = os.path.realpath(path)
        try:
            self.tree = WorkTree(self.source)
            try:
                # The open directory counts: its name may refer to something else by now.
                self.source, found = self.tree.where()
                if pinned is not None:
                    self.check_allowed(path, self.source, "host_work_dir")
                    _exempt_from_sweep(self.source)
            except BaseException:
                self.tree.close()
                raise
        except BaseException:
            if self._owned is not None:
                self._owned.remove_if_empty()  # nothing has used it yet
            raise
        self.identity = (found.st_dev, found.st_ino)
        self.owner = (found.st_uid, found.st_gid)
        self._set_tree_owner()

    @property
    def tmp_dir(self) -> str | None:
        """The directory for temporary files, of a backend that isolates on the host's root."""
        return f"{self.scratch}/{TMP_NAME}" if self.has_tmp_dir else None

    def check_allowed(self, path: str, source: str, argument: str) -> None:
        """Raise if the caller may not name ``source``, the real path of ``path``."""
        if self.allowed is not None and not is_allowed(source, self.allowed):
            raise not_allowed(argument, path)

    def keep(self, read_only: ReadOnlyPaths) -> None:
        """Protect the session's read-only paths below this directory from changes."""
        self._kept = read_only
        self._update_kept()

    def keep_during_call(self, read_only: ReadOnlyPaths) -> Callable[[], None]:
        """Protect the read-only paths of one call; return the function that ends it."""
        self._kept_by_calls.append(read_only)
        self._update_kept()

        def end() -> None:
            self._kept_by_calls.remove(read_only)
            self._update_kept()

        return end

    def _update_kept(self) -> None:
        top = self.source + "/"
        kept = [*self._kept_by_calls] if self._kept is None else [self._kept, *self._kept_by_calls]
        sources = {source for one in kept for source in one.sources}
        self._read_only = tuple(s[len(top) :] for s in sorted(sources) if s.startswith(top))
        self.tree.kept = frozenset(identity for one in kept for identity in one.kept)

    def check_changeable(self, path: str) -> None:
        """Raise if ``path`` is, or lies below, a read-only path.

        Replacing it would remove its mount from running sandboxes.
        """
        if not self._read_only:
            return
        below = work_path(path, work_dir=self.path, allow_root=True)
        for kept in self._read_only:
            if f"{below}/".startswith(f"{kept}/"):
                raise SandboxPathError(
                    f"{shown_path(path)} is read-only in this session ({kept})",
                    path=path,
                    code="path-read-only",
                    hint=f"change {self.source}/{below} with the host's own tools, or open the "
                    "session without it in read_only_paths",
                )

    def chown(self, uid: int, gid: int) -> None:
        """Change the owner of the whole tree; only for a private directory."""
        if self.owner != (uid, gid):
            self.tree.give_to(uid, gid)
            self.owner = (uid, gid)
            self._set_tree_owner()

    def _set_tree_owner(self) -> None:
        # Only root can change owners; files of other callers have the right owner already.
        self.tree.owner = self.owner if kernel.is_root() else None

    def use(self, tree: WorkTree, owner: tuple[int, int]) -> None:
        """Perform file calls in another tree from now on; the old one is closed.

        Args:
            tree: the tree.
            owner: user and group of its files.

        """
        last, self.tree = self.tree, tree
        tree.kept = last.kept
        tree.owner = owner if kernel.is_root() else None
        last.close()

    @property
    def owned(self) -> OwnedDir | None:
        """The private directory; None if the caller named one."""
        return self._owned

    def keep_as_layer(self) -> None:
        """Leave the removal of the private directory to the layers that refer to it."""
        self._owned = None

    def remove(self) -> None:
        """Close the directory; remove it if it was made for the session."""
        self.tree.close()
        try:
            if self._owned is not None:
                self._owned.remove()
        finally:
            if self.on_remove is not None:
                self.on_remove()

    def release(self) -> None:
        """Close the directory and leave it to a later sweep.

        Layers keep their locks until this process ends.
        """
        self.tree.close()
        if self._owned is not None:
            self._owned.release()


def is_allowed(path: str, allowed: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one.rstrip("/") + "/") for one in allowed)


def not_allowed(argument: str, path: str) -> PolicyError:
    return PolicyError(
        f"{argument}: {path} is not among the paths that this server allows",
        argument=argument,
        hint="start the server with --allow-path for it, or for a directory above it",
    )


def default_parent() -> str:
    """Return the directory in which private work dirs are created."""
    return _PREFERRED if os.access(_PREFERRED, os.W_OK | os.X_OK) else tempfile.gettempdir()


def make_private_dir(place: str | None) -> OwnedDir:
    """Create a private directory in ``place``, or in the default directory."""
    try:
        return OwnedDir.make(place or default_parent())
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        if exc.errno in NO_SPACE:
            raise disk_full(place or default_parent()) from exc
        # The text of ``tempfile`` is a list of all directories that it has tried.
        is_missing = place is None and isinstance(exc, FileNotFoundError)
        raise SandboxUsageError(
            f"no work dir could be created: {_NO_TEMPORARY if is_missing else exc.strerror}",
            argument="host_work_dir",
            hint="pass host_work_dir=, or set TMPDIR to a writable directory",
        ) from exc


def disk_full(place: str) -> SandboxExecutionError:
    """Return the error for a session or checkpoint that has no room in the directory ``place``."""
    return SandboxExecutionError(
        f"the disk of {place} is full: {os.strerror(errno.ENOSPC)}",
        code="disk-full",
        hint=f"free space on the disk of {place}, or drop() checkpoints that are not needed; then "
        "repeat the call",
    )


@contextlib.contextmanager
def report_full_disk(place: str) -> Iterator[None]:
    """Translate the error of a full disk into one that names the disk and the remedy."""
    try:
        yield
    except OSError as exc:
        if exc.errno in NO_SPACE:
            raise disk_full(place) from exc
        raise


def start_removal(key: object, directory: WorkDir | OwnedDir) -> asyncio.Future[None]:
    """Remove a directory of a closing session in a thread."""
    try:
        return threads.removal.start(key, directory.remove)
    except threads.PoolFullError as exc:
        directory.release()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(exc)
        return failed


def _exempt_from_sweep(path: str) -> None:
    try:
        disown(path)
    except BlockingIOError as exc:
        raise SandboxUsageError(
            f"host_work_dir: {path} is the private work dir of an ended session, and is being "
            "removed",
            argument="host_work_dir",
            hint="use another directory",
        ) from exc


_swept: Final[set[str]] = set()


def sweep_in_background(place: str) -> None:
    """Remove the work dirs that a killed process left in ``place``, in a thread.

    Runs once per process and directory. Its duration depends on what sandboxed code left there, so
    neither the event loop nor an opening session waits for it.
    """
    if place in _swept:
        return
    _swept.add(place)
    sweeping = threads.removal.start("sweep", functools.partial(sweep, place))
    sweeping.add_done_callback(_log_failure)


def _log_failure(sweeping: asyncio.Future[None]) -> None:
    if not sweeping.cancelled() and (exc := sweeping.exception()) is not None:
        _log.warning("left-over work dirs were not removed", exc_info=exc)


def _validated(path: str) -> str:
    path = os.path.normpath(path)
    try:
        found = os.stat(path)
    except OSError as exc:
        raise SandboxUsageError(
            f"host_work_dir: {path}: {exc.strerror}",
            argument="host_work_dir",
            hint="pass an existing directory",
        ) from exc
    if not stat.S_ISDIR(found.st_mode):
        raise SandboxUsageError(
            f"host_work_dir must be a directory; {path} is not one", argument="host_work_dir"
        )
    for spelling in {path, os.path.realpath(path)}:
        if spelling == "/" or spelling in _RESERVED:
            raise PolicyError(
                f"host_work_dir={path!r} is a system directory; it cannot be a work dir",
                argument="host_work_dir",
                hint="use another directory",
            )
    return path
