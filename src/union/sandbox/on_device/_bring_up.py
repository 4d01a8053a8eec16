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
from union.sandbox._linux.ids import SessionId
from union.sandbox._linux.launcher import NamespaceRefusedError
from union.sandbox._linux.pinning import Places
from union.sandbox._linux.prepared import NotBuiltError, Sandbox
from union.sandbox._linux.protocol import FailurePlace
from union.sandbox._linux.remedies import explain
from union.sandbox._session.threads import until_done
from union.sandbox.errors import PolicyError
from union.sandbox.on_device import _probe, _programs
from union.sandbox.on_device._engine import inspect, posture_class
from union.sandbox.on_device._private_root import PrivateRoot
from union.sandbox.on_device._settings import named_paths

if TYPE_CHECKING:
    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.machine import Machine
    from union.sandbox._plan.rootfs import View
    from union.sandbox.on_device._pool import Pool
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._work_layers import HeldMount
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Postures"]

_BUILD_AHEAD: Final = 4
_log = logging.getLogger("union.sandbox")
_builders: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def _build_slots() -> asyncio.Semaphore:
    """Return the semaphore that limits how many sessions of this event loop build ahead at once."""
    return _builders.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_BUILD_AHEAD))


class Postures:
    """The postures of one session, one for each network shape, compiled at first use."""

    def __init__(self, spec: SessionSpec, backend: Backend, *, work: WorkDir, pool: Pool) -> None:
        self._spec = spec
        self._work = work
        self._pool = pool
        self._backend = backend
        self.features = _probe.HostFeatures()
        self.programs: Programs | None = None
        """The host's programs; resolved before any sandboxed code runs."""
        self._postures: dict[NetworkShape, Posture] = {}
        self._root: PrivateRoot | None = None
        """The private root of all of them."""
        self._probed: set[NetworkShape] = set()
        self._own_id = SessionId()
        self._building = asyncio.Lock()
        self.layers: HeldMount | None = None
        """The layers of the work dir; None for a plain directory."""
        self.layer_kind = "plain"
        self._early_build: asyncio.Task[None] | None = None

    @property
    def work_dir(self) -> str:
        """The path of the work dir on the host."""
        return self._work.source

    @property
    def machine(self) -> Machine | None:
        """The machine of the session; None if it has none, or it is not started yet."""
        return None if self._root is None else self._root.machine

    def get(self, shape: NetworkShape) -> Posture:
        """Return the posture of a network shape, compiled but perhaps not built yet."""
        if self._root is not None and not self._root.is_intact(shape):
            if self._root.machine is not None:
                raise OSError(
                    errno.ESTALE,
                    "a path that the session shows read-only was replaced on the host, and "
                    "persist='machine' keeps its mounts; open a new session",
                )
            self.close()  # the caller replaced a read-only path
        posture = self._postures.get(shape)
        if posture is None:
            posture = self._compile(
                self._spec, self.programs, shape, self._backend, self.features, root=self._root
            )
            self._postures[shape] = posture
            if self._root is None:
                self._root = posture.root
                self._work.keep(posture.read_only)
        return posture

    def for_call(self, spec: SessionSpec, shape: NetworkShape) -> Posture:
        """Return a new posture for one call, which the caller closes.

        Earlier calls may have had writable paths of their own, so the places where links are
        refused are collected again.
        """
        programs = self.programs
        if programs is not None:
            places = Places.of(programs.places.writable, programs.places.read_only)
            if spec.read_write_paths == self._spec.read_write_paths:
                programs = dataclasses.replace(programs, places=places)
            else:
                for _ in named_paths(spec, self._work, places):
                    pass  # raises before programs are searched for in refused places
                programs = _programs.resolve(spec, self._work)
        return self._compile(spec, programs, shape, self._backend, self.features)

    def _compile(
        self,
        spec: SessionSpec,
        programs: Programs | None,
        shape: NetworkShape,
        backend: Backend,
        features: _probe.HostFeatures,
        *,
        root: PrivateRoot | None = None,
    ) -> Posture:
        if not self._pool.sandboxes.is_open or programs is None:
            # The session closes while a command starts: nothing would close a new posture.
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")
        if root is None:
            found = inspect(
                spec, self._work, features=features, programs=programs, own=self._own_id
            )
            root = PrivateRoot(found)
            root.layers = self.layers
            if self.layers is not None and (covered := _covered(found.view)):
                root.release()
                raise covered
        else:
            root.share()
        posture = posture_class(backend.name)(
            spec, shape, root=root, backend=backend, features=features, programs=programs
        )
        if self.layer_kind != posture.isolation.layers:
            posture.isolation = dataclasses.replace(posture.isolation, layers=self.layer_kind)
        _programs.record_writable(programs)
        return posture

    def set_layers(self, kind: str) -> None:
        """Report what the work dir is made of from now on."""
        self.layer_kind = kind
        for posture in self._postures.values():
            posture.isolation = dataclasses.replace(posture.isolation, layers=kind)

    def is_current(self, posture: Posture) -> bool:
        """Return whether the next command of this shape uses this posture."""
        return self._postures.get(posture.shape) is posture

    def usable(self, shape: NetworkShape) -> Posture | None:
        """Return the posture of a network shape if its sandboxes can be made at once, else None.

        They are known to work here, and their shared part is built.
        """
        root = self._root  # each command passes here: with as few calls as possible
        if root is not None and shape in self._probed and root.is_intact(shape):
            posture = self._postures.get(shape)
            if posture is not None and posture.is_built:
                return posture
        return self.get(shape) if self._pool.is_bare else None

    async def ready(self, shape: NetworkShape) -> Posture:
        """Probe this network shape if that was not done yet, and build its shared part."""
        async with self._building:
            if shape not in self._probed:
                await self.probe(shape)
            outcome = await self.get(shape).build(self._pool.channel())
            if outcome.failure is not None:
                self._discard(shape)  # the next command resolves paths again
        if outcome.failure is not None:
            raise NotBuiltError(explain(*outcome.failure, "", outcome.stderr_text.encode()))
        return self.get(shape)

    async def probe(self, shape: NetworkShape) -> None:
        """Find the host features for one network shape by building throw-away sandboxes."""
        self.features = await _probe.find_features(
            functools.partial(self._try_features, shape),
            self._spec,
            without_bwrap=functools.partial(self._try_without_bwrap, shape),
            opened=self.features if self._probed else None,
        )
        self._pool.channel().check_limits(self._spec.backend)
        if self._spec.strict:
            self.get(shape).check_strict()
        self._probed.add(shape)

    async def try_out(self, shape: NetworkShape) -> None:
        """Start a sandbox of this network shape, on a system without host features to find."""
        await self.get(shape).try_out(self._pool.channel())

    async def _try_features(
        self, shape: NetworkShape, features: _probe.HostFeatures
    ) -> _probe.Outcome:
        """Build one sandbox with this session's own plan and inspect it from outside."""
        if features != self.features:
            self.features = features
            self.close()
        try:
            posture = self.get(shape)
        except NamespaceRefusedError as exc:
            return _probe.Outcome((FailurePlace.CLONE, exc.errno or 0))
        shares = posture.plan.shared is not None
        what = _probe.VerifiedSetup(
            backend=self._spec.backend,
            builder=posture.builder,
            network=shape,
            features=features,
            ids=posture.isolation.ids,
            persist=self._spec.persist,
            device=self._work.identity[0],
        )
        if shares and what in _probe.verified:
            # Its sandboxes differ from verified ones only in their shared part. Unless the caller
            # added paths to that, opening does not wait for it; the first command does.
            if not self._shows_own_paths():
                self._early_build = self._early_build or asyncio.create_task(
                    self._build_ahead(posture)
                )
                return _probe.Outcome(None)
            outcome = await posture.build(self._pool.channel())
            if outcome.failure is None:
                self._pool.keep_first(posture)
            else:
                self._discard(shape)  # the next attempt resolves paths again
            return outcome
        outcome, sandbox = await self._inspect(posture)
        if sandbox is None:
            self._discard(shape)
            return outcome
        if shares:
            _probe.verified.add(what)
        if posture.is_plain:
            self._pool.sandboxes.keep(posture, sandbox)
        else:
            sandbox.release()
        return outcome

    def _shows_own_paths(self) -> bool:
        spec = self._spec
        own = (spec.host_work_dir, spec.work_dir_name, spec.read_only_paths, spec.read_write_paths)
        return any(own)

    async def _build_ahead(self, posture: Posture) -> None:
        """Build the shared part and the first sandbox while the caller continues."""
        try:
            # A command of this session does not wait for a slot: it only takes the lock.
            async with _build_slots(), self._building:
                # A command that came first has built it, or replaced the posture.
                if not self.is_current(posture) or posture.is_built:
                    return
                outcome = await posture.build(self._pool.channel())
                if outcome.failure is None:
                    self._pool.keep_first(posture)
        except OSError:
            # The first command tries again, and reports the error if that fails too.
            _log.debug("building ahead failed", exc_info=True)

    async def _try_without_bwrap(
        self, shape: NetworkShape, features: _probe.HostFeatures
    ) -> _probe.Outcome:
        """Build the same sandbox without bwrap, by the launcher alone."""
        features = dataclasses.replace(features, share=False)
        posture = self._compile(self._spec, self.programs, shape, registry.get("userns"), features)
        try:
            outcome, sandbox = await self._inspect(posture)
            if sandbox is not None:
                sandbox.release()
            return outcome
        finally:
            posture.close()

    async def _inspect(self, posture: Posture) -> tuple[_probe.Outcome, Sandbox | None]:
        """Build and verify one sandbox; return the outcome, and the sandbox if it works."""
        channel = self._pool.channel()
        outcome = await posture.build(channel)
        if outcome.failure is not None:
            return outcome, None
        first_pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number, sock = posture.prepare(channel, pid=first_pid)
        try:
            outcome = await _probe.verify_sandbox(
                sock, first_pid, posture.isolation, owner=posture.owner
            )
        except BaseException:
            sock.close()
            raise
        sandbox = Sandbox(number, sock, channel=channel, owner=posture.owner)
        posture.equip(sandbox)
        if outcome.failure is None:
            return outcome, sandbox
        sandbox.release()
        return dataclasses.replace(outcome, copied=posture.plan.shared is not None), None

    def _discard(self, shape: NetworkShape) -> None:
        """Close a posture that failed, and all others if their private root is not built either."""
        self._postures.pop(shape).close()
        if self._root is not None and not self._root.namespaces:
            self.close()

    async def stop(self) -> None:
        """Cancel the build that runs ahead of the first command."""
        if self._early_build is not None:
            self._early_build.cancel()
            await until_done(self._early_build)

    def release_id(self) -> None:
        """Release the session's own host id, once no process uses it any more."""
        self._own_id.release()

    def close(self) -> None:
        """Close every posture and release the spares of all of them."""
        self._pool.release()
        for posture in self._postures.values():
            posture.close()
        self._postures.clear()
        self._root = None


def _covered(view: View) -> PolicyError | None:
    """Return the error for a path in a work dir with layers, which would cover its mount."""
    for item in view.added:
        if item.path.startswith(view.work_dir + "/"):
            return PolicyError(
                f"{item.path} lies in the work dir, whose paths cannot be named after its first "
                "checkpoint",
                argument="read_only_paths",
                hint="copy it out of the work dir, or take no checkpoint in this session",
            )
    return None
