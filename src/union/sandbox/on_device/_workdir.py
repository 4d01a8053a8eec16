"""The work dir: made private, or pinned by the caller and then never removed."""

from __future__ import annotations

import asyncio
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
from union.sandbox._session import threads
from union.sandbox.errors import PolicyError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from union.sandbox.on_device._read_only import ReadOnly

__all__ = [
    "WorkDir",
    "WorkPlace",
    "is_allowed",
    "make_owned",
    "not_allowed",
    "sweep_in_background",
]

_log = logging.getLogger("union.sandbox")

_RESERVED: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/tmp",  # noqa: S108 - a name, not a file
)  # fmt: skip
"""Directories with a meaning of their own inside; a work dir may lie below, not stand for one."""
_PREFERRED: Final = "/var/tmp"  # noqa: S108 - made private by mkdtemp
"""Not below /tmp if it can be helped: that is empty inside. else it is the system's choice."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """Where private work dirs are made, and where a sandbox sees its own, if not there."""

    directory: str
    shown_at: str | None = None
    allowed: tuple[str, ...] | None = None
    """The paths that a session may name, with all below them; None is any."""


class WorkDir:
    """A directory, held by a descriptor from open to close.

    ``path`` is its name inside, ``source`` where it is on this host: usually the same.
    """

    def __init__(self, pinned: str | None, place: WorkPlace | None = None) -> None:
        self.is_ours = pinned is None
        self._owned: OwnedDir | None = None
        if pinned is None:
            self._owned = make_owned(None if place is None else place.directory)
            path = self._owned.path
            self.path = path if place is None or place.shown_at is None else place.shown_at
        else:
            path = self.path = _checked(pinned)
        self._read_only: tuple[str, ...] = ()
        self._kept: ReadOnly | None = None
        self._kept_by_calls: list[ReadOnly] = []
        self.allowed = None if place is None else place.allowed
        self.source = os.path.realpath(path)
        try:
            self.tree = WorkTree(self.source)
            try:
                # What is held is what counts: a name may have come to mean something else.
                self.source, found = self.tree.where()
                if pinned is not None:
                    self.check_allowed(self.path, self.source, "host_work_dir")
                    _keep_pinned(self.source)
            except BaseException:
                self.tree.close()
                raise
        except BaseException:
            if self._owned is not None:
                self._owned.remove_if_empty()  # nothing has used it yet
            raise
        self.identity = (found.st_dev, found.st_ino)
        self.owner = (found.st_uid, found.st_gid)
        self._tell_tree()

    def check_allowed(self, path: str, source: str, argument: str) -> None:
        """Raises if ``source``, the real place of ``path``, is not the caller's to name."""
        if self.allowed is not None and not is_allowed(source, self.allowed):
            raise not_allowed(argument, path)

    def keep(self, read_only: ReadOnly) -> None:
        """Never change or remove what the session shows read-only below this directory."""
        self._kept = read_only
        self._update_kept()

    def keep_during_call(self, read_only: ReadOnly) -> Callable[[], None]:
        """Do the same for one call; return the function that ends it."""
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
        """Raise if ``path`` is, or lies below, something that is shown read-only.

        To replace it would remove its mount from the sandboxes that are running.
        """
        if not self._read_only:
            return
        below = work_path(path, work_dir=self.path, allow_root=True)
        for kept in self._read_only:
            if f"{below}/".startswith(f"{kept}/"):
                raise SandboxPathError(
                    f"{shown_path(path)} is shown read-only in this session ({kept}); it is not "
                    "changed",
                    path=path,
                    code="path-read-only",
                    hint=f"change {self.source}/{below} with the host's own tools, or open the "
                    "session without it in read_only_paths",
                )

    def give_to(self, uid: int, gid: int) -> None:
        """Makes the whole tree belong to another id; only for a directory of the session's own."""
        if self.owner != (uid, gid):
            self.tree.give_to(uid, gid)
            self.owner = (uid, gid)
            self._tell_tree()

    def _tell_tree(self) -> None:
        # Only root can give files away; of anybody else they are the right owner's already.
        self.tree.owner = self.owner if kernel.is_root() else None

    def remove(self) -> None:
        """Close the directory; remove it if it was made for the session."""
        self.tree.close()
        if self._owned is not None:
            self._owned.remove()

    def release(self) -> None:
        """Close the directory and leave it to a later sweep."""
        self.tree.close()
        if self._owned is not None:
            self._owned.release()


def is_allowed(path: str, allowed: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one.rstrip("/") + "/") for one in allowed)


def not_allowed(argument: str, path: str) -> PolicyError:
    return PolicyError(
        f"{argument}: {path} is not among the paths that this server lets clients use",
        argument=argument,
        hint="start the server with --allow-path for it, or for a directory above it",
    )


def _place() -> str:
    """Return the directory below which private work dirs are made."""
    return _PREFERRED if os.access(_PREFERRED, os.W_OK | os.X_OK) else tempfile.gettempdir()


def make_owned(place: str | None) -> OwnedDir:
    """Make a private directory in ``place``, or where this system has room for temporary files."""
    try:
        return OwnedDir.make(place or _place())
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise SandboxUsageError(
            f"no work dir could be made: {exc.strerror}",
            argument="host_work_dir",
            hint="pass host_work_dir=, or set TMPDIR to a directory that can be written",
        ) from exc


def start_removal(key: object, directory: WorkDir | OwnedDir) -> asyncio.Future[None]:
    """Remove a directory of a session that closes, off the event loop."""
    try:
        return threads.removal.start(key, directory.remove)
    except threads.PoolFullError as exc:
        directory.release()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(exc)
        return failed


def _keep_pinned(path: str) -> None:
    try:
        disown(path)
    except BlockingIOError as exc:
        raise SandboxUsageError(
            f"host_work_dir: {path} is the work dir of a session that has ended, and is being "
            "removed",
            argument="host_work_dir",
            hint="use a directory of its own",
        ) from exc


_swept: Final[set[str]] = set()


def sweep_in_background(place: str) -> None:
    """Remove the work dirs that a killed process left in ``place``, in a thread of its own pool.

    Once per process and place. How long it takes depends on what sandboxed code has left there, so
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


def _checked(path: str) -> str:
    path = os.path.normpath(path)
    try:
        found = os.stat(path)
    except OSError as exc:
        raise SandboxUsageError(
            f"host_work_dir: {path}: {exc.strerror}",
            argument="host_work_dir",
            hint="it must be an existing directory",
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
                hint="use a directory of its own",
            )
    return path
