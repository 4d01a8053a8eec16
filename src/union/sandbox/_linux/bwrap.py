"""The system's ``bwrap``: where it is, and whether it has what is needed. Asked once per binary."""

from __future__ import annotations

import errno
import functools
import os
import stat
import subprocess
from dataclasses import dataclass
from typing import Final

from union.sandbox._core.bwrap_args import NEEDED
from union.sandbox.errors import BackendUnavailableError

__all__ = ["Bwrap", "find"]

_NAME: Final = "bwrap"
_BACKEND: Final = "bubblewrap"
_ALSO: Final = ("/usr/local/bin", "/usr/bin", "/bin")
_PATIENCE_S: Final = 10
_INSTALL: Final = (
    "install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap; "
    "Alpine: apk add bubblewrap; Arch: pacman -S bubblewrap), or pass backend='userns', which "
    "needs no other program"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bwrap:
    """A bwrap that can be used."""

    program: str
    version: str
    enters_userns: bool
    """Whether it can be given a user namespace (``--userns``)."""
    file: tuple[int, int]
    """Inode and time of change: another one at the same path is another program."""


def find() -> Bwrap:
    """The bwrap on PATH, or where systems keep it. Raises when there is none that serves."""
    for directory in dict.fromkeys((*os.get_exec_path(), *_ALSO)):
        program = os.path.join(directory, _NAME)
        # Relative entries of PATH mean something else to whoever runs in another directory.
        if os.path.isabs(program) and os.path.isfile(program) and os.access(program, os.X_OK):
            found = os.stat(program)
            _refuse_setuid(program, found.st_mode)
            return _ask(os.path.realpath(program), found.st_ino, found.st_mtime_ns)
    raise BackendUnavailableError(
        f"the {_BACKEND!r} backend needs the program bwrap, which is not installed",
        backend=_BACKEND,
        missing=(_NAME,),
        hint=_INSTALL,
    )


def _refuse_setuid(program: str, mode: int) -> None:
    if mode & stat.S_ISUID and os.geteuid() != 0:
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend does not work here: {program} is installed set-uid, and "
            "then gives nobody but root what the sandbox is set up with",
            backend=_BACKEND,
            missing=("bwrap without set-uid",),
            hint=f"as root: chmod u-s {program} (needs user namespaces for ordinary users), or "
            "pass backend='userns'",
        )


@functools.lru_cache(maxsize=8)
def _ask(program: str, inode: int, changed_ns: int) -> Bwrap:
    """What it can do, in its own words: distributions add options to old versions."""
    version = _told(program, "--version").split()[-1:] or ["of unknown version"]
    offered = set(_told(program, "--help").split())
    lacking = tuple(option for option in NEEDED if option not in offered)
    if lacking:
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend does not work here: {program} {version[0]} has no "
            f"{', '.join(lacking)}",
            backend=_BACKEND,
            missing=lacking,
            hint="install bubblewrap 0.5 or newer, or pass backend='userns'",
        )
    return Bwrap(
        program=program,
        version=version[0],
        enters_userns="--userns" in offered,
        file=(inode, changed_ns),
    )


def _told(program: str, option: str) -> str:
    try:
        done = subprocess.run(
            [program, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        if isinstance(exc, OSError) and exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise  # it says nothing about bwrap
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend does not work here: {program} does not start: {exc}",
            backend=_BACKEND,
            missing=(_NAME,),
            hint=_INSTALL,
        ) from exc
    return done.stdout.decode("utf-8", "replace")
