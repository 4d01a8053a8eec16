"""Changes of one call to its session: extra or narrower paths, and lower limits.

Rules of this file:

- A call lowers limits, never raises them.
- A call may add paths, or show a writable path read-only. It never makes a path writable that its
  session names read-only.
"""

from __future__ import annotations

import dataclasses
import posixpath
from typing import TYPE_CHECKING, Final

from union.sandbox._core.resources import limits_from
from union.sandbox._core.spec import CallPosture, Limits, SessionSpec
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RESOURCE_OF", "check_lower", "is_below", "limits_of_call", "spec_of_call"]

RESOURCE_OF: Final = {
    "memory_bytes": "memory",
    "cpus": "cpu",
    "file_size_bytes": "file_size",
    "tmp_bytes": "tmp",
    "shm_bytes": "shm",
    "gpus": "gpu",
    "disk_bytes": "disk",
}
"""Field of `Limits` -> field of `Resources`, where the names differ."""


def limits_of_call(resources: object, session: Limits) -> Limits:
    """Return the limits of one call.

    Raises:
        PolicyError: a limit is higher than the session's.
        SandboxUsageError: ``resources`` is not a valid value.

    """
    limits = limits_from(resources, base=session)
    check_lower(limits, session)
    if limits.disk_bytes != session.disk_bytes:
        raise PolicyError(
            "resources: disk is a limit of the session, not of one call",
            argument="resources",
            hint="open the session with resources.disk",
        )
    return limits


def check_lower(limits: Limits, session: Limits) -> None:
    """Raise `PolicyError` if any limit is higher than the session's; None is no limit."""
    for field in dataclasses.fields(Limits):
        requested, ceiling = getattr(limits, field.name), getattr(session, field.name)
        if ceiling is not None and (requested is None or requested > ceiling):
            name = RESOURCE_OF.get(field.name, field.name)
            raise PolicyError(
                f"resources: {name}={requested!r} is more than the session's {name}={ceiling!r}",
                argument="resources",
                hint=f"a call can only lower a limit; open the session with a higher {name}",
            )


def is_below(path: str, top: str) -> bool:
    """Return whether ``path`` is ``top`` or lies below it; both are normalized."""
    return path == top or path.startswith(top.rstrip("/") + "/")


def spec_of_call(session: SessionSpec, call: CallPosture) -> SessionSpec:
    """Return the session as this one call sees it.

    Raises:
        PolicyError: the call names one path as both, or makes a read-only path writable.

    """
    read_only = _normalized(call.read_only_paths)
    read_write = _normalized(call.read_write_paths)
    for path in read_write:
        if path in read_only:
            raise PolicyError(
                f"read_write_paths: {path} is in read_only_paths of the same call",
                argument="read_write_paths",
            )
        for top in _normalized(session.read_only_paths):
            if is_below(path, top):
                raise read_only_in_session(path, top)
    kept = [
        path
        for path in _normalized(session.read_write_paths)
        if not any(is_below(path, top) for top in read_only)
    ]
    dropped = [path for path in _normalized(session.read_write_paths) if path not in kept]
    found = dataclasses.replace(
        session,
        read_only_paths=_once(session.read_only_paths, read_only, dropped),
        read_write_paths=_once(kept, read_write),
        limits=call.limits,
    )
    if session.persist == "machine" and found != session:
        raise PolicyError(
            "resources, read_only_paths and read_write_paths of one call need a sandbox of its "
            "own, and commands of persist='machine' share one",
            argument="resources" if call.limits != session.limits else "read_write_paths",
            hint="open the session with these limits and paths, or use another session",
        )
    return found


def read_only_in_session(path: str, top: str) -> PolicyError:
    """Return the error for a path that a call may not make writable."""
    where = "" if path == top else f" (below {top})"
    return PolicyError(
        f"read_write_paths: the session shows {path} read-only{where}",
        argument="read_write_paths",
        hint="a call cannot make it writable; open the session with it in read_write_paths",
    )


def _normalized(paths: Iterable[str]) -> list[str]:
    return [posixpath.normpath(path) for path in paths]


def _once(*lists: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for paths in lists for path in paths))
