"""Bring-up: compile the postures of one session, try each on this host, build what they share."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import logging
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from union.sandbox._backends import registry
from union.sandbox._linux.failures import explain
from union.sandbox._linux.launcher import NamespaceRefusedError
from union.sandbox._linux.pinning import Places
from union.sandbox._linux.prepared import Sandbox
from union.sandbox._linux.run import NotBuiltError
from union.sandbox._session.threads import until_done
from union.sandbox.on_device import _probe, _programs
from union.sandbox.on_device._posture import Posture
from union.sandbox.on_device._session_id import SessionId
from union.sandbox.on_device._settings import named_paths

if TYPE_CHECKING:
    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox.on_device._pool import Pool
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Postures"]

_CLONE: Final = 101
_BUILD_AHEAD: Final = 4
_log = logging.getLogger("union.sandbox")
_builders: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def _turn_to_build() -> asyncio.Semaphore:
    """Of a thousand sessions that are opened at once, a few build ahead at a time."""
    return _builders.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_BUILD_AHEAD))


class Postures:
    """The postures of one session, one for each shape of network, made at first use."""

    def __init__(self, spec: SessionSpec, backend: Backend, *, work: WorkDir, pool: Pool) -> None:
        self._spec = spec
        self._work = work
        self._pool = pool
        self._backend = backend
        self.facts = _probe.Facts()
        self.programs: Programs | None = None
        """The host's programs; resolved before anything runs."""
        self._postures: dict[NetworkShape, Posture] = {}
        self._tried: set[NetworkShape] = set()
        self._own_id = SessionId()
        self._building = asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None

    @property
    def work_dir(self) -> str:
        """The work dir by its place on the host."""
        return self._work.source

    def get(self, shape: NetworkShape) -> Posture:
        """Return the posture, compiled but perhaps not built yet."""
        posture = self._postures.get(shape)
        if posture is not None and not posture.is_intact:
            self.close()  # the caller replaced what is shown read-only
            posture = None
        if posture is None:
            posture = self._make(shape, self._backend, self.facts)
            self._postures[shape] = posture
        return posture

    def _make(self, shape: NetworkShape, backend: Backend, facts: _probe.Facts) -> Posture:
        posture = self._compile(self._spec, self.programs, shape, backend, facts)
        self._work.keep(posture.read_only)
        return posture

    def for_call(self, spec: SessionSpec, shape: NetworkShape) -> Posture:
        """Return a new posture for one call, which the caller closes.

        Earlier calls may have had writable paths of their own, so the places where links are
        refused are gathered anew.
        """
        programs = self.programs
        if programs is not None:
            places = Places.of(programs.places.writable, programs.places.read_only)
            if spec.read_write_paths == self._spec.read_write_paths:
                programs = dataclasses.replace(programs, places=places)
            else:
                for _ in named_paths(spec, self._work, places):
                    pass  # raises before programs are looked for in refused places
                programs = _programs.resolve(spec, self._work)
        return self._compile(spec, programs, shape, self._backend, self.facts)

    def _compile(
        self,
        spec: SessionSpec,
        programs: Programs | None,
        shape: NetworkShape,
        backend: Backend,
        facts: _probe.Facts,
    ) -> Posture:
        if not self._pool.sandboxes.is_open or programs is None:
            # It belongs to a command that was being started: nothing would close it any more.
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")
        posture = Posture(
            spec,
            shape,
            backend=backend,
            work=self._work,
            facts=facts,
            programs=programs,
            own=self._own_id,
        )
        _programs.note_shown(programs)
        return posture

    def is_current(self, posture: Posture) -> bool:
        """Whether the next command of this shape takes this posture."""
        return self._postures.get(posture.shape) is posture

    def is_ready(self, posture: Posture) -> bool:
        """Whether its sandboxes are known to work here and what they share is built."""
        return posture.shape in self._tried and posture.is_built

    async def ready(self, shape: NetworkShape) -> Posture:
        """Try this shape of network if that is due, and build what its sandboxes share."""
        async with self._building:
            if shape not in self._tried:
                await self.try_out(shape)
            outcome = await self.get(shape).build(self._pool.channel())
        if outcome.failure is not None:
            raise NotBuiltError(explain(*outcome.failure, "", outcome.said.encode()))
        return self.get(shape)

    async def try_out(self, shape: NetworkShape) -> None:
        """Find the facts for one shape of network, with one throw-away sandbox or a few."""
        self.facts = await _probe.settle(
            functools.partial(self._trial, shape),
            self._spec,
            without_bwrap=functools.partial(self._trial_without_bwrap, shape),
            opened=self.facts if self._tried else None,
        )
        self._pool.channel().check_limits(self._spec.backend)
        self.get(shape).check_ids(strict=self._spec.strict)
        self._tried.add(shape)

    async def _trial(self, shape: NetworkShape, facts: _probe.Facts) -> _probe.Outcome:
        """Build one sandbox with this session's own plan and inspect it from outside."""
        if facts != self.facts:
            self.facts = facts
            self.close()
        try:
            posture = self.get(shape)
        except NamespaceRefusedError as exc:
            return _probe.Outcome((_CLONE, exc.errno or 0))
        shares = posture.plan.shared is not None
        what = _probe.Verified(
            backend=self._spec.backend,
            builder=posture.builder,
            network=shape,
            facts=facts,
            ids=posture.isolation.ids,
            device=self._work.identity[0],
        )
        if shares and what in _probe.verified:
            # Its sandboxes differ from those that were inspected only in what they share. Unless
            # the caller added to that, opening need not wait for it; the first command does.
            if not self._shows_own_paths():
                self._ahead = self._ahead or asyncio.create_task(self._build_ahead(posture))
                return _probe.Outcome(None)
            outcome = await posture.build(self._pool.channel())
            if outcome.failure is None:
                self._pool.keep_first(posture)
            else:
                self._postures.pop(shape).close()  # the next attempt resolves paths again
            return outcome
        outcome, sandbox = await self._inspect(posture)
        if sandbox is None:
            self._postures.pop(shape).close()
            return outcome
        if shares:
            _probe.verified.add(what)
        if posture.is_plain:
            self._pool.sandboxes.keep(posture, sandbox)
        else:
            sandbox.let_go()
        return outcome

    def _shows_own_paths(self) -> bool:
        spec = self._spec
        return bool(spec.host_work_dir or spec.read_only_paths or spec.read_write_paths)

    async def _build_ahead(self, posture: Posture) -> None:
        """Build what sandboxes will share, and the first of them, while the caller goes on."""
        try:
            # A command of this session does not queue here: it takes the lock, and builds at once.
            async with _turn_to_build(), self._building:
                # A command that came before has built it, or found that it takes another posture.
                if not self.is_current(posture) or posture.is_built:
                    return
                outcome = await posture.build(self._pool.channel())
                if outcome.failure is None:
                    self._pool.keep_first(posture)
        except OSError:
            # The first command tries again, and reports the error if it cannot either.
            _log.debug("nothing could be built ahead", exc_info=True)

    async def _trial_without_bwrap(
        self, shape: NetworkShape, facts: _probe.Facts
    ) -> _probe.Outcome:
        """Build the same sandbox by the launcher alone."""
        facts = dataclasses.replace(facts, share=False)
        posture = self._make(shape, registry.get("userns"), facts)
        try:
            outcome, sandbox = await self._inspect(posture)
            if sandbox is not None:
                sandbox.let_go()
            return outcome
        finally:
            posture.close()

    async def _inspect(self, posture: Posture) -> tuple[_probe.Outcome, Sandbox | None]:
        """Return how it went, and the sandbox if it went well."""
        channel = self._pool.channel()
        outcome = await posture.build(channel)
        if outcome.failure is not None:
            return outcome, None
        looked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number, sock = posture.prepare(channel, pid=looked)
        try:
            outcome = await _probe.look(sock, looked, posture.isolation, owner=posture.owner)
        except BaseException:
            sock.close()
            raise
        sandbox = Sandbox(number, sock, line=channel, owner=posture.owner)
        if outcome.failure is None:
            return outcome, sandbox
        sandbox.let_go()
        return dataclasses.replace(outcome, copied=posture.plan.shared is not None), None

    async def stop(self) -> None:
        """End the build that goes on ahead of the first command."""
        if self._ahead is not None:
            self._ahead.cancel()
            await until_done(self._ahead)

    def release_id(self) -> None:
        """Return the session's own id, once no process uses it any more."""
        self._own_id.release()

    def close(self) -> None:
        """Drop every posture and everything that waits in one."""
        self._pool.release()
        for posture in self._postures.values():
            posture.close()
        self._postures.clear()
