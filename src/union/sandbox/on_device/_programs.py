"""What a session executes and shows of its owner: resolved once, before any sandboxed code runs."""

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

__all__ = ["Programs", "note_shown", "owner_paths", "resolve"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""This package: its modules and the launcher, all of them executed by the host."""
_log = logging.getLogger("union.sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs of one session, and the places that sandboxed code can write."""

    places: Places
    """Where sandboxed code can write, of this session and of earlier ones."""
    own: frozenset[tuple[int, int]]
    """The directories that this session itself shows writable."""
    others: Places
    """The same without a work dir that was made for this session: it was empty at first, so nothing
    of the owner and no program is reached through it."""
    uv: str
    bwrap: Bwrap | None
    shown_writable: tuple[tuple[tuple[int, int], str], ...] = ()
    """The ``read_write_paths`` with their identities."""


def resolve(spec: SessionSpec, work: WorkDir) -> Programs:
    """Find every program that the session will execute.

    Raises:
        BackendUnavailableError: a program is missing, or somebody else can replace it.

    """
    writable = {work.identity}
    shown = []
    for path in spec.read_write_paths:
        try:
            identity = identity_of(os.stat(path))
        except OSError:
            continue  # an error of its own, when the path is looked up to be shown
        writable.add(identity)
        shown.append((identity, path))
    if not work.is_ours:
        note_writable(work.identity, work.source)
    python = host.interpreter()
    places = others = Places.of(frozenset(writable), _own(python))
    if work.is_ours:
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


def note_shown(programs: Programs) -> None:
    """Record the writable paths of a posture for all later sessions, once they are accepted.

    A path that was refused must not be recorded: it would be refused to everybody.
    """
    for identity, path in programs.shown_writable:
        note_writable(identity, path)


def _own(python: Interpreter) -> frozenset[tuple[int, int]]:
    """Directories that every sandbox shows read-only, also where all around them is writable."""
    found = set()
    for path in (*python.paths, _PACKAGE):
        try:
            found.add(identity_of(os.stat(path)))
        except OSError:
            continue
    return frozenset(found)


def owner_paths(python: Interpreter, programs: Programs, *, isolated: bool) -> Iterator[Shown]:
    """Yield what sandboxes see of the owner's Python, read-only.

    This package is shown if it lies where sandboxed code could write to it otherwise. What
    editable installs refer to is shown unless sandboxed code can write there by the caller's wish.
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
                yield item  # else it is visible already, and writable by the caller's wish
        except (OSError, SandboxUsageError):
            _log.debug("an editable install is not shown: %s", path, exc_info=True)


def _lies_in(path: str, places: Places) -> bool:
    """Return whether a directory lies in a writable one, whatever is shown of it."""
    with pin(path, Places(places.writable)) as found:
        return found.is_writable_place


def _check_python(python: Interpreter, places: Places) -> None:
    """Raise if sandboxed code could put another Python in the place of the running one."""
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
        "sandboxed code can write, so sandboxed code could put another Python in its place",
        missing=("interpreter",),
        hint=f"replace the link by what it leads to ({exc.target}), start Python by a path without "
        "it, or choose a work dir that does not hold the link",
    )
