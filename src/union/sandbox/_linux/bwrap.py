"""The system's ``bwrap``: its path and its options, probed once per binary."""

from __future__ import annotations

import errno
import functools
import os
import stat
import subprocess
from dataclasses import dataclass
from typing import Final

from union.sandbox._linux import host_programs
from union.sandbox._linux.pinning import Places
from union.sandbox._plan.bwrap_args import NEEDED
from union.sandbox.errors import BackendUnavailableError

__all__ = ["Bwrap", "find"]

_NAME: Final = "bwrap"
_BACKEND: Final = "bubblewrap"
_TIMEOUT_S: Final = 10
_INSTALL: Final = (
    "install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap; "
    "Alpine: apk add bubblewrap; Arch: pacman -S bubblewrap), or pass backend='userns', which "
    "needs no other program"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bwrap:
    """A bwrap that has all needed options."""

    program: str
    version: str
    enters_userns: bool
    """Whether it can be given a user namespace (``--userns``)."""
    file: tuple[int, int]
    """Inode and time of change: another one at the same path is another program."""


def find(places: Places | None = None) -> Bwrap:
    """Return the bwrap on PATH, or where systems keep it.

    Args:
        places: where sandboxed code can write, so that no program there is executed.

    Raises:
        BackendUnavailableError: there is none, it lacks an option, or others can replace it.

    """
    search = host_programs.find(_NAME, places=places or Places.of(frozenset()))
    if search.program is not None:
        program, found = search.program.path, search.program.found
        _refuse_setuid(program, found.st_mode)
        return _probe(program, found.st_ino, found.st_mtime_ns)
    why = "cannot be trusted" if search.refused else "is not installed"
    raise BackendUnavailableError(
        f"the {_BACKEND!r} backend needs the program bwrap, which {why}"
        + host_programs.because(search.refused),
        backend=_BACKEND,
        missing=(_NAME,),
        hint=_INSTALL + host_programs.remedy(search.refused),
    )


def _refuse_setuid(program: str, mode: int) -> None:
    if mode & stat.S_ISUID and os.geteuid() != 0:
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend does not work here: {program} is installed set-uid, and "
            "then only root can set up a sandbox with it",
            backend=_BACKEND,
            missing=("bwrap without set-uid",),
            hint=f"as root: chmod u-s {program} (needs user namespaces for ordinary users), or "
            "pass backend='userns'",
        )


@functools.lru_cache(maxsize=8)
def _probe(program: str, inode: int, changed_ns: int) -> Bwrap:
    """Return the options that it lists in its help: distributions add some to old versions."""
    version = _output_of(program, "--version").split()[-1:] or ["of unknown version"]
    offered = set(_output_of(program, "--help").split())
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


def _output_of(program: str, option: str) -> str:
    try:
        done = subprocess.run(
            [program, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        if isinstance(exc, OSError) and exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise  # not a property of bwrap
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend does not work here: {program} does not start: {exc}",
            backend=_BACKEND,
            missing=(_NAME,),
            hint=_INSTALL,
        ) from exc
    return done.stdout.decode("utf-8", "replace")
