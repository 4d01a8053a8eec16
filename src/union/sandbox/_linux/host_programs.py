"""Programs that the host itself executes: found once per session, and only where they are safe.

A program is refused if somebody other than root and the caller can replace it: sandboxed code
(below a work dir or a ``read_write_paths`` entry), or another user (a directory on the way, or the
file, is writable by others; that includes sticky directories such as /tmp). Every link on the way
is resolved by hand, and the directory that holds it is judged as well.
"""

from __future__ import annotations

import errno
import functools
import grp
import importlib.util
import itertools
import os
import pwd
import site
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import path_of
from union.sandbox._linux.pinning import LinkInWritablePlaceError, Pinned, Places, pin
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

__all__ = ["Found", "Search", "because", "find", "find_uv", "remedy", "version_of"]

SYSTEM_DIRECTORIES: Final = ("/usr/local/bin", "/usr/bin", "/bin")
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES})
_ACL: Final = "system.posix_acl_access"
_VERSION_TIMEOUT_S: Final = 10.0


class _UnsafeError(Exception):
    """Why a program is not executed."""


@dataclass(frozen=True, slots=True)
class Found:
    """A program that only root and the caller can replace."""

    path: str
    """Its canonical path: no component of it is a link."""
    found: os.stat_result

    def is_unchanged(self) -> bool:
        """Return whether the same file is still there."""
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        then = self.found
        return (now.st_dev, now.st_ino, now.st_ctime_ns) == (
            then.st_dev,
            then.st_ino,
            then.st_ctime_ns,
        )


@dataclass(frozen=True, slots=True)
class Search:
    """The outcome of a search: a program, or none and the reasons for each that was refused."""

    program: Found | None
    refused: tuple[str, ...] = ()


_known: Final[dict[tuple[object, ...], Found]] = {}
_MAX_KNOWN: Final = 64


def find(name: str, *, places: Places, before: Iterable[str] = ()) -> Search:
    """Search for a program in ``before``, on PATH and in the system's directories, in this order.

    An unsafe candidate is skipped; ``Search.refused`` says why. A program that an earlier session
    found under the same conditions, and that is unchanged, is taken without a new search.
    """
    key = (name, places, os.environ.get("PATH"), SYSTEM_DIRECTORIES, sys.executable, os.geteuid())
    known = _known.get(key)
    if known is not None and known.is_unchanged():
        return Search(known)
    search = _searched(name, places, before)
    if search.program is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = search.program
    return search


def _searched(name: str, places: Places, before: Iterable[str]) -> Search:
    refused: list[str] = []
    seen: set[str] = set()
    for directory in itertools.chain(before, os.get_exec_path(), SYSTEM_DIRECTORIES):
        # A relative entry of PATH depends on the current directory, which may be a work dir.
        if directory in seen or not os.path.isabs(directory):
            continue
        seen.add(directory)
        candidate = os.path.join(directory, name)
        try:
            found = _judged(candidate, places)
        except _UnsafeError as exc:
            refused.append(f"{candidate}: {exc}")
        else:
            if found is not None:
                return Search(found, tuple(refused))
    return Search(None, tuple(refused))


def find_uv(places: Places) -> str:
    """Return the path of ``uv``: of the PyPI package beside the interpreter, or on PATH.

    Raises:
        BackendUnavailableError: there is none, or only such as others can replace.

    """
    search = find("uv", places=places, before=_uv_directories(places))
    if search.program is not None:
        return search.program.path
    raise BackendUnavailableError(
        "uv was not found, and the session venv needs it" + because(search.refused),
        missing=("uv",),
        hint="pip install uv" + (_REMEDY if search.refused else ""),
    )


_REMEDY: Final = (
    "; or install the program where only root and this user can write, outside every work dir "
    "and read_write_paths entry"
)


def because(refused: tuple[str, ...]) -> str:
    """Return the part of an error message that names the candidates that were refused."""
    return f" (refused: {'; '.join(refused)})" if refused else ""


def remedy(refused: tuple[str, ...]) -> str:
    """Return the hint for candidates that were refused."""
    return _REMEDY if refused else ""


def _judged(candidate: str, places: Places) -> Found | None:
    """Return the program if it is safe, None if nothing executable is there."""
    trusted = _own_directory(os.path.dirname(candidate), places)
    try:
        with pin(candidate, places, check=_accept if trusted else _require_safe) as pinned:
            if not stat.S_ISREG(pinned.found.st_mode):
                return None
            if not os.access(pinned.handle, os.X_OK):
                return None
            if pinned.is_writable_place:
                raise _UnsafeError("it lies where sandboxed code can write")
            return Found(pinned.source, pinned.found)
    except LinkInWritablePlaceError as exc:
        raise _UnsafeError(f"{exc.link} is a link where sandboxed code can write") from exc
    except _UnsafeError:
        if _is_there(candidate, places):
            raise
        return None  # an unsafe directory without such a program in it
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            return None
        raise


def _is_there(candidate: str, places: Places) -> bool:
    try:
        with pin(candidate, places):
            return True
    except LinkInWritablePlaceError:
        return True
    except OSError:
        return False


def _own_directory(directory: str, places: Places) -> bool:
    """Return whether this is the directory of the running interpreter.

    Users who can write there control this process already, so nothing is gained by a refusal.
    """
    if os.path.normpath(directory) != os.path.dirname(os.path.abspath(sys.executable)):
        return False
    try:
        with pin(directory, places) as pinned:
            return not pinned.is_writable_place
    except OSError:
        return False


def _accept(fd: int, found: os.stat_result) -> None:
    """Accept every component."""


def _require_safe(fd: int, found: os.stat_result) -> None:
    """Raise unless only root and the caller can change what this descriptor stands for."""
    if found.st_uid not in _trusted_owners():
        raise _UnsafeError(f"{path_of(fd)} belongs to user {found.st_uid}")
    if found.st_mode & stat.S_IWOTH:
        raise _UnsafeError(f"{path_of(fd)} is writable by every user")
    if found.st_mode & stat.S_IWGRP and not (_is_private_group(found.st_gid) and not _has_acl(fd)):
        raise _UnsafeError(f"{path_of(fd)} is writable by group {found.st_gid}")


def _trusted_owners() -> frozenset[int]:
    return frozenset({0, os.geteuid(), *_unmapped()})


@functools.cache
def _unmapped() -> frozenset[int]:
    """The id that stands for users outside this user namespace, who are no users in it."""
    try:
        ranges = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        mapped = sum(int(line.split()[2]) for line in ranges)
        if mapped >= 2**32 - 1:
            return frozenset()
        return frozenset({int(Path("/proc/sys/fs/overflowuid").read_text(encoding="ascii"))})
    except (OSError, ValueError):
        return frozenset()


@functools.lru_cache(maxsize=64)
def _is_private_group(gid: int) -> bool:
    """Return whether the group has no member but root and the caller."""
    trusted = _trusted_owners()
    try:
        names = grp.getgrgid(gid).gr_mem
    except KeyError:
        names = []
    members = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == gid}
    for name in names:
        try:
            members.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            return False
    return gid in {0, os.getegid(), *os.getgroups()} and members <= trusted


def _has_acl(fd: int) -> bool:
    """Return whether an access list may give others what the group bits show."""
    if not IS_LINUX:
        return False  # elsewhere the group bits are those of the group alone
    try:
        return bool(os.getxattr(f"/proc/self/fd/{fd}", _ACL))
    except OSError as exc:
        return exc.errno not in {errno.ENODATA, errno.ENOTSUP}


def _uv_directories(places: Places) -> Iterator[str]:
    """Yield the directories where an installer of Python packages puts ``uv``."""
    yield os.path.dirname(os.path.abspath(sys.executable))
    yield sysconfig.get_path("scripts")
    yield sysconfig.get_path("scripts", vars={"base": sys.base_prefix})
    yield sysconfig.get_path("scripts", scheme=sysconfig.get_preferred_scheme("user"))
    if beside := _beside_package(places):
        yield os.path.dirname(beside)


def _beside_package(places: Places) -> str | None:
    """Return what ``uv.find_uv_bin()`` answers, asked of an installed package alone.

    ``import uv`` could find a file in the current directory, which may be a work dir.
    """
    installed = [*site.getsitepackages(), sysconfig.get_path("purelib"), _user_site()]
    for directory in filter(None, dict.fromkeys(installed)):
        file = os.path.join(directory, "uv", "_find_uv.py")
        try:
            with pin(file, places) as pinned:
                if pinned.is_writable_place:
                    continue
                module = _loaded(pinned)
        except (OSError, ImportError):
            continue
        try:
            answer = module.find_uv_bin()
        except (AttributeError, OSError):
            continue
        return str(answer)
    return None


def _user_site() -> str:
    return site.getusersitepackages() if site.ENABLE_USER_SITE else ""


def _loaded(pinned: Pinned) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_union_sandbox_find_uv", pinned.source)
    if spec is None or spec.loader is None:
        raise ImportError(pinned.source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version_of(program: str) -> str:
    """Return the first line that ``program --version`` prints.

    Raises:
        OSError: the program cannot be executed.
        subprocess.SubprocessError: it fails, or does not end in time.

    """
    done = subprocess.run(
        [program, "--version"],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_VERSION_TIMEOUT_S,
    )
    return done.stdout.strip().partition("\n")[0]
