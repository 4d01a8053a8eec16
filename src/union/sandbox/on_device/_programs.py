"""Host programs and owner packages of a session, resolved once before sandboxed code runs."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import bwrap, host, host_programs
from union.sandbox._linux.pinning import (
    LinkInWritablePlaceError,
    Places,
    identity_of,
    note_writable,
    pin,
)
from union.sandbox.errors import BackendUnavailableError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.bwrap import Bwrap
    from union.sandbox._linux.host import Interpreter
    from union.sandbox._plan.rootfs import Shown
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Programs", "owner_paths", "record_writable", "resolve"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""This package: its modules and the launcher, all of them executed by the host."""
_log = logging.getLogger("union.sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs of one session, and the directories that sandboxed code can write."""

    places: Places
    """Where sandboxed code can write, of this session and of earlier ones."""
    own: frozenset[tuple[int, int]]
    """The directories that are writable in this session's own sandboxes."""
    others: Places
    """Like ``places``, without a private work dir: it was empty at first, so no program and no
    package of the owner is reached through it."""
    uv: str
    bwrap: Bwrap | None
    shown_writable: tuple[tuple[tuple[int, int], str], ...] = ()
    """The ``read_write_paths`` with their identities."""


def resolve(spec: SessionSpec, work: WorkDir) -> Programs:
    """Find every program that the session will execute.

    Raises:
        BackendUnavailableError: a program is missing, or sandboxed code could replace it.

    """
    writable = {work.identity}
    shown = []
    for path in spec.read_write_paths:
        try:
            identity = identity_of(os.stat(path))
        except OSError:
            continue  # reported with the argument's name when the path is mounted
        writable.add(identity)
        shown.append((identity, path))
    if not work.is_private:
        note_writable(work.identity, work.source)
    python = host.interpreter()
    places = others = Places.of(frozenset(writable), _own(python))
    if work.is_private:
        others = Places(places.writable - {work.identity}, places.read_only)
    if spec.backend != "none" and others.writable:
        _check_python(python, others)
    return Programs(
        places=places,
        own=frozenset(writable),
        others=others,
        uv=host_programs.find_uv(others),
        bwrap=bwrap.find(others) if spec.backend == "bubblewrap" else None,
        shown_writable=tuple(shown),
    )


def record_writable(programs: Programs) -> None:
    """Record the writable paths of a posture for all later sessions, once they are accepted.

    A path that was refused must not be recorded: it would be refused to every session.
    """
    for identity, path in programs.shown_writable:
        note_writable(identity, path)


def _own(python: Interpreter) -> frozenset[tuple[int, int]]:
    """Return directories that are read-only in every sandbox, even inside writable ones."""
    found = set()
    for path in (*python.paths, _PACKAGE):
        try:
            found.add(identity_of(os.stat(path)))
        except OSError:
            continue
    return frozenset(found)


def owner_paths(python: Interpreter, programs: Programs, *, isolated: bool) -> Iterator[Shown]:
    """Yield the read-only paths of the owner's Python.

    This package is mounted read-only if it lies in a directory that sandboxed code can write.
    Targets of editable installs are mounted unless the caller made them writable.
    """
    places = programs.others
    if not places.writable:
        yield from map(host.shown, (*python.paths, *filter(os.path.exists, python.editable)))
        return
    for path in (*python.paths, _PACKAGE):
        try:
            item, _ = host.pinned(path, places, argument="interpreter")
        except LinkInWritablePlaceError as exc:
            if not isolated:
                continue
            raise _through_link(path, exc) from exc
        if path != _PACKAGE or _lies_in(path, places):
            yield item
    for path in python.editable:
        try:
            item, _ = host.pinned(path, places)
            if not _lies_in(path, Places(programs.own)):
                yield item  # otherwise the caller has made it visible and writable
        except (OSError, SandboxUsageError):
            _log.debug("an editable install is not visible in sandboxes: %s", path, exc_info=True)


def _lies_in(path: str, places: Places) -> bool:
    """Return whether a directory lies in a writable one, however it is mounted."""
    with pin(path, Places(places.writable)) as found:
        return found.is_writable_place


def _check_python(python: Interpreter, places: Places) -> None:
    """Raise if sandboxed code could replace the running Python."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    for path in dict.fromkeys(filter(None, (sys.executable, base, *python.paths))):
        try:
            with pin(path, places):
                pass
        except LinkInWritablePlaceError as exc:
            raise _through_link(path, exc) from exc
        except FileNotFoundError:
            continue


def _through_link(path: str, exc: LinkInWritablePlaceError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the running Python ({path}) is reached through {exc.link}, a link in a directory that "
        "sandboxed code can write, so sandboxed code could replace it",
        missing=("interpreter",),
        hint=f"replace the link by its target ({exc.target}), start Python by a path without "
        "it, or choose a work dir that does not contain the link",
    )
