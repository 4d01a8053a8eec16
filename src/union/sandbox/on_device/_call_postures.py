"""Postures of calls that have paths or limits of their own.

Rules of this file:

- A call's paths pass the same checks as the session's, again for every call: the plan that
  results, with the identities in it, is the key of the cache.
- Such a posture has no spare sandboxes, so that a path of one call is in no sandbox of another.
- A call never gets weaker isolation than its session reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from union.sandbox._core.resolve_call import is_below, read_only_in_session, spec_of_call
from union.sandbox._linux.prepared import NotBuiltError
from union.sandbox._linux.remedies import explain
from union.sandbox._linux.spares import IDLE_S
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import CallPosture, SessionSpec
    from union.sandbox._plan.rootfs import Shown
    from union.sandbox.on_device._bring_up import Postures
    from union.sandbox.on_device._pool import Pool
    from union.sandbox.on_device._posture import Posture

__all__ = ["CallPostures"]

_MAX_KEPT: Final = 4
"""Postures kept built for calls that repeat; each holds a few file descriptors."""
_Identities = tuple[tuple[str, int, int, int], ...]
_Key = tuple[bytes, "SessionSpec", _Identities]


class _Kept:
    """A cached posture, and the number of calls that are preparing a sandbox with it."""

    def __init__(self, posture: Posture) -> None:
        self.posture = posture
        self.users = 0
        self.is_stale = False
        self.building = asyncio.Lock()


class CallPostures:
    """Compile, build and cache the postures of such calls, for one session."""

    def __init__(self, spec: SessionSpec, *, postures: Postures, pool: Pool) -> None:
        self._spec = spec
        self._postures = postures
        self._pool = pool
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._expiry: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def posture(self, shape: NetworkShape, call: CallPosture) -> AsyncIterator[Posture]:
        """Lend the posture of one call, built and ready.

        Raises:
            PolicyError: a path is refused, or the isolation would be weaker than the session's.
            NotBuiltError: the sandbox cannot be built on this host.

        """
        usual = self._postures.usable(shape) or await self._postures.ready(shape)
        kept = self._find(shape, call, usual)
        kept.users += 1
        try:
            if not self._pool.is_bare:
                await self._build(kept)
            yield kept.posture
        finally:
            kept.users -= 1
            if kept.is_stale and not kept.users:
                kept.posture.close()
            self._trim(_MAX_KEPT)
            self._expire_later()

    def _find(self, shape: NetworkShape, call: CallPosture, usual: Posture) -> _Kept:
        spec = spec_of_call(self._spec, call)
        fresh = self._postures.for_call(spec, shape)
        try:
            self._check_paths(fresh, call)
            _check_not_weaker(fresh.isolation, usual.isolation)
            key = (fresh.cache_key, spec, _identities(spec))
        except BaseException:
            fresh.close()
            raise
        kept = self._kept.get(key)
        if kept is not None and kept.posture.is_intact:
            fresh.close()
        else:
            self._discard(key)
            kept = self._kept[key] = _Kept(fresh)
        self._kept.move_to_end(key)
        return kept

    async def _build(self, kept: _Kept) -> None:
        async with kept.building:
            outcome = await kept.posture.build(self._pool.channel())
        if outcome.failure is not None:
            raise NotBuiltError(explain(*outcome.failure, "", outcome.stderr_text.encode()))

    def _check_paths(self, posture: Posture, call: CallPosture) -> None:
        """Check the resolved paths: a link must not bypass a rule."""
        shown = {item.path: item for item in posture.view.added}
        writable = [item for item in shown.values() if item.writable and not item.guard]
        session_read_only = _named(shown, self._spec.read_only_paths)
        for item in _named(shown, call.read_write_paths):
            for top in session_read_only:
                if is_below(item.source, top.source):
                    raise read_only_in_session(item.path, top.path)
        own = {os.path.normpath(path) for path in call.read_write_paths}
        for item in _named(shown, call.read_only_paths):
            _check_read_only(item, writable, shown, own)
        if self._pool.is_bare and call.read_only_paths:
            self._check_bare(call)

    def _check_bare(self, call: CallPosture) -> None:
        """Refuse a read-only path that the backend without isolation leaves writable."""
        places = [self._postures.work_dir, *map(os.path.realpath, self._spec.read_write_paths)]
        for path in call.read_only_paths:
            real = os.path.realpath(path)
            if any(is_below(real, place) or is_below(place, real) for place in places):
                raise PolicyError(
                    f"read_only_paths: backend={self._spec.backend!r} cannot make {path} "
                    "read-only for one call",
                    argument="read_only_paths",
                    hint="use backend='userns' or backend='bubblewrap', on Linux",
                )

    def _discard(self, key: _Key) -> None:
        """Drop a posture whose mounts are gone; the last call that uses it closes it."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.is_stale = True
            if not kept.users:
                kept.posture.close()

    def _trim(self, max_kept: int) -> None:
        for key, kept in tuple(self._kept.items()):
            if len(self._kept) <= max_kept:
                return
            if not kept.users:
                del self._kept[key]
                kept.posture.close()

    def _expire_later(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._kept:
            self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self._trim, 0)

    def close(self) -> None:
        """Close every posture; a call that is starting fails with a closed posture."""
        if self._expiry is not None:
            self._expiry.cancel()
        for kept in self._kept.values():
            kept.posture.close()
        self._kept.clear()


def _named(shown: dict[str, Shown], paths: Iterable[str]) -> list[Shown]:
    return [shown[path] for path in map(os.path.normpath, paths) if path in shown]


def _identities(spec: SessionSpec) -> _Identities:
    """Return what changes when a named file is replaced, which requires another posture."""
    found = []
    for path in (*spec.read_only_paths, *spec.read_write_paths):
        status = os.stat(path)
        # A file that was unlinked and linked again has lost its mounts.
        changed = 0 if stat.S_ISDIR(status.st_mode) else status.st_ctime_ns
        found.append((path, status.st_dev, status.st_ino, changed))
    return tuple(found)


def _check_read_only(
    item: Shown, writable: Iterable[Shown], shown: dict[str, Shown], own: set[str]
) -> None:
    """Refuse a read-only path that stays writable under another name."""
    for other in writable:
        if is_below(item.source, other.source):
            name = other.path + item.source[len(other.source) :]
            if name not in shown or shown[name].writable:
                raise _also_writable(item.path, name)
        elif is_below(other.source, item.source) and other.path not in own:
            raise _also_writable(item.path, other.path)


def _check_not_weaker(call: Isolation, session: Isolation) -> None:
    # The limits of a call are checked elsewhere; a watch on its memory adds rules to its filter.
    is_filtered = bool(call.seccomp) == bool(session.seccomp)
    if not is_filtered or _layers(call) != _layers(session):
        raise PolicyError(
            "read_write_paths: on this host a sandbox with these paths is isolated differently "
            f"from the session (ids {call.ids!r} instead of {session.ids!r})",
            argument="read_write_paths",
            hint="open the session with these paths, and read session.isolation",
        )


def _also_writable(path: str, other: str) -> PolicyError:
    return PolicyError(
        f"read_only_paths: {path} would stay writable as {other}",
        argument="read_only_paths",
        hint=f"name {other} in read_only_paths",
    )


def _layers(isolation: Isolation) -> Isolation:
    # The profile differs by the number of its paths.
    return dataclasses.replace(isolation, limits=(), seccomp="", profile="")
