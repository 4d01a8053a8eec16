"""LocalTransport: a session on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from union.sandbox._backends import registry
from union.sandbox._core.paths import work_path
from union.sandbox._linux.process_list import list_processes, of_commands, stop_process
from union.sandbox._plan.rootfs import VAR_TMP, of_network
from union.sandbox._session import threads
from union.sandbox._session.async_files import AsyncFiles
from union.sandbox._session.threads import until_done
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxUsageError
from union.sandbox.on_device import _programs
from union.sandbox.on_device._bring_up import Postures
from union.sandbox.on_device._network import SessionNetwork, shape_of
from union.sandbox.on_device._pool import Pool
from union.sandbox.on_device._runner import Runner
from union.sandbox.on_device._shell import find_shell
from union.sandbox.on_device._start_gate import StartGate
from union.sandbox.on_device._workdir import (
    TMP_NAME,
    WorkDir,
    default_parent,
    make_private_dir,
    start_removal,
    sweep_in_background,
)

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Iterable

    from union.sandbox._contexts.specs import ContextSpec
    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._files.inside import InsideFiles
    from union.sandbox._linux.machine import Machine
    from union.sandbox._linux.owned_dir import OwnedDir
    from union.sandbox._linux.run import LocalRun
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._checkpoints import LocalCheckpoints, Origin
    from union.sandbox.on_device._contexts import LocalContext
    from union.sandbox.on_device._workdir import WorkPlace

__all__ = ["LocalTransport"]


class _Parts(NamedTuple):
    """The parts of an open session, besides its pool."""

    work: WorkDir
    postures: Postures
    runner: Runner


class LocalTransport:
    """Run commands as sandboxed child processes on this machine.

    The work is done by three parts: ``Postures`` (bring-up and probing), ``Pool`` (prepared
    sandboxes and Pythons) and ``Runner`` (commands).
    """

    def __init__(
        self,
        spec: SessionSpec,
        *,
        place: WorkPlace | None = None,
        network: SessionNetwork | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._spec = spec
        self._origin = origin
        self.changes = StartGate()
        """Holds back file calls that change the work dir while a checkpoint is taken."""
        self._network = network or SessionNetwork()
        # A backend without a private root cannot mount the work dir under another path.
        bare_place = place and dataclasses.replace(place, shown_at=None)
        is_bare = spec.backend in registry.HOST_ROOT or not IS_LINUX
        self._place = bare_place if is_bare else place
        self._backend = registry.get(spec.backend)
        self.pool = Pool(spec)
        self.pool.is_served = place is not None
        self._scratch: OwnedDir | None = None
        self._parts: _Parts | None = None

    # Opening and closing.

    async def open(self) -> None:
        pool = self.pool
        if self._origin is not None:
            self.checkpoint_calls.hold_origin()
        try:
            # First: if file descriptors run out later, this one is available for the clean-up.
            pool.reserve()
            scratch = None
            if pool.uses_host_root or pool.is_bare:
                self._scratch = make_private_dir(
                    tempfile.gettempdir() if IS_LINUX and pool.is_bare else None
                )
                scratch = self._scratch.path
                os.mkdir(f"{scratch}/{TMP_NAME}", 0o700)
                sweep_in_background(os.path.dirname(scratch))
            work = WorkDir(self._spec.host_work_dir, self._place, shown_at=self._spec.work_dir_name)
            work.scratch = scratch
            work.has_tmp_dir = self._spec.backend == "landlock"
            postures = Postures(self._spec, self._backend, work=work, pool=pool)
            runner = Runner(
                self._spec,
                work=work,
                scratch=scratch,
                pool=pool,
                postures=postures,
                network=self._network,
            )
            find_shell(self._spec.shell)  # raises if it is missing
            self._parts = _Parts(work, postures, runner)
            if work.is_private:
                sweep_in_background(os.path.dirname(work.source))
            # The launcher first: its error explains more than one about a missing program. No
            # sandboxed code runs before the programs are resolved.
            pool.connect()
            postures.programs = _programs.resolve(self._spec, work)
            if not pool.is_bare:
                await postures.probe(shape_of(self._spec.network))
            elif self._spec.backend != "none":
                await postures.try_out(shape_of(self._spec.network))
            if self._spec.limits.disk_bytes is not None:
                await self.checkpoint_calls.limit_disk(self._spec.limits.disk_bytes)
            if self._origin is not None:
                await self.checkpoint_calls.begin()
        except OSError as exc:
            raise pool.spawn_failed("the session could not be opened", exc) from exc

    async def aclose(self) -> None:
        """End everything; runs to completion even if the caller is cancelled."""
        pool, parts = self.pool, self._parts
        inside: InsideFiles | None = self.__dict__.get("inside")
        if inside is not None:
            inside.close()
        pool.sandboxes.close()
        if parts is not None:
            await parts.postures.stop()
            if parts.postures.machine is not None:
                await until_done(*parts.postures.machine.close_networks())
        pool.release()
        stuck: BaseException | None = None
        if parts is not None:
            parts.runner.end_all(for_good=True)
            if pool.opened_channel is not None:
                drained = pool.opened_channel.drain()
                await until_done(drained)
                stuck = drained.exception()
                await parts.runner.all_ended(is_stuck=stuck is not None)
        pool.disconnect()
        if parts is not None:
            parts.runner.close_postures()
        pool.sandboxes.release_machine_group()
        # If the launcher was killed, its processes may still be exiting.
        groups = pool.sandboxes.groups_removed(timeout_s=None if stuck is None else 0.0)
        await until_done(groups)
        if parts is not None and stuck is None and groups.exception() is None:
            parts.postures.release_id()
        removals = [*self._removals()]
        if self._scratch is not None:
            removals.append(start_removal(self, self._scratch))
        if parts is not None:
            removals.append(start_removal(self, parts.work))
        await until_done(*removals)
        for error in (groups.exception(), stuck, *(done.exception() for done in removals)):
            if error is not None:
                raise error

    def _opened(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the transport is not open")
        return self._parts

    @property
    def postures(self) -> Postures:
        return self._opened().postures

    # Checkpoints.

    @functools.cached_property
    def checkpoint_calls(self) -> LocalCheckpoints:
        """The calls about checkpoints; see ``CheckpointCalls``."""
        from union.sandbox.on_device._checkpoints import LocalCheckpoints

        return LocalCheckpoints(self, origin=self._origin)

    @property
    def layers(self) -> str:
        """What the work dir is made of; see ``Isolation.layers``."""
        return "plain" if self._parts is None else self._parts.postures.layer_kind

    def _removals(self) -> Iterable[asyncio.Future[None]]:
        return self.checkpoint_calls.end() if "checkpoint_calls" in self.__dict__ else ()

    def forked(self, origin: Origin) -> LocalTransport:
        """Return the transport of a new session that begins with a checkpoint of this one."""
        from union.sandbox.on_device._workdir import WorkPlace

        work = self._opened().work
        place = WorkPlace(
            os.path.dirname(work.source) if work.is_private else default_parent(),
            shown_at=work.path,
            allowed=work.allowed,
        )
        spec = dataclasses.replace(self._spec, host_work_dir=None, work_dir_name=None)
        return LocalTransport(spec, place=place, network=self._network.forked(), origin=origin)

    # Properties.

    @property
    def spec(self) -> SessionSpec:
        return self._spec

    @property
    def work(self) -> WorkDir:
        return self._opened().work

    @property
    def runner(self) -> Runner:
        return self._opened().runner

    @property
    def is_known(self) -> bool:
        return self._parts is not None

    @property
    def work_dir(self) -> str:
        return self._opened().work.path

    @property
    def shell(self) -> str:
        return find_shell(self._spec.shell)

    @property
    def host_dir(self) -> str:
        """The path of the work dir on this host; a sandbox may see it under another path."""
        return self._opened().work.source

    @property
    def isolation(self) -> Isolation:
        return self.postures.get(shape_of(self._spec.network)).isolation

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        shape = shape_of(self._spec.network)
        view = of_network(self.postures.get(shape).view, shape)
        read_only = [s.path for s in (*view.system, *view.added) if not s.writable]
        writable = [s.path for s in view.added if s.writable and not s.guard]
        own = () if self.pool.uses_host_root else ("/dev/shm", "/tmp")  # noqa: S108 - names inside
        if self.pool.is_machine:
            own = (*own, VAR_TMP)
        return {
            "read_only": tuple(sorted(read_only)),
            "read_write": (*own, *sorted(writable)),
        }

    # Running.

    def start(self, spec: RunSpec, sink: Sink) -> Coroutine[Any, Any, LocalRun]:
        # Without a call of its own, as every command passes here.
        return (self._parts or self._opened()).runner.start(spec, sink)

    async def open_context(self, spec: ContextSpec) -> LocalContext:
        """Start the interpreter of a context."""
        from union.sandbox.on_device._contexts import LocalContext

        context = LocalContext(
            self._opened().runner, spec, session=self._spec, network=self._network
        )
        await context.open()
        return context

    async def start_helper(
        self, argv: tuple[str, ...], sock: socket.socket, sink: Sink
    ) -> LocalRun:
        """Start a program of the product's own in the machine; see ``Runner.start_helper``."""
        return await self._opened().runner.start_helper(argv, sock, sink)

    def _machine(self) -> Machine:
        if self._spec.persist != "machine":
            raise SandboxUsageError(
                "the processes of a command end with it in this session",
                hint="open the session with persist='machine'",
            )
        machine = self.postures.machine
        if machine is None:
            raise RuntimeError("the machine has not been started")
        return machine

    async def processes(self) -> tuple[ProcessInfo, ...]:
        if self._spec.persist == "machine" and self.postures.machine is None:
            return ()  # no command was started yet
        machine = self._machine()
        found = await threads.files.run(machine, list_processes, machine.proc)
        running, hidden = self._opened().runner.labels()
        return of_commands(found, running=running, hidden=hidden)

    async def stop_process(self, pid: int) -> bool:
        if self._spec.persist == "machine" and self.postures.machine is None:
            return False
        machine = self._machine()
        _, hidden = self._opened().runner.labels()
        return await threads.files.run(machine, stop_process, machine.proc, pid, hidden=hidden)

    async def idle(self) -> None:
        """Wait until no command of the session runs; see ``Runner.idle``."""
        await self._opened().runner.idle()

    # Files.

    @functools.cached_property
    def inside(self) -> InsideFiles | None:
        """The file calls that are performed inside the sandbox: those of a machine."""
        if self._spec.persist != "machine":
            return None
        from union.sandbox.on_device._inside_files import inside_files

        return inside_files(self._opened().runner, work_dir=self.work_dir)

    @property
    def is_machine(self) -> bool:
        """Whether file calls accept every path that is visible inside."""
        return self.inside is not None

    async def connect_inside(self) -> InsideFiles | None:
        """Return the file calls of a machine; None if the session is none."""
        if self.inside is not None:
            self._opened().runner.forget_venv()
        return self.inside

    def _files(self) -> AsyncFiles | InsideFiles:
        return self.inside or AsyncFiles(self._opened().work.tree, work_dir=self.work_dir)

    @contextlib.asynccontextmanager
    async def _changing(self, path: str) -> AsyncIterator[AsyncFiles | InsideFiles]:
        """Yield the files for a change; afterwards the next command verifies the venv."""
        if self.inside is None:  # the sandbox itself protects what it may not change
            self._opened().work.check_changeable(path)
        async with self.changes:
            try:
                yield self._files()
            finally:
                self._opened().runner.forget_venv()

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        async with self._changing(path) as files:
            return await files.put(path, data, mode=mode, overwrite=overwrite)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._files().get(path, max_bytes=max_bytes)

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        async with self._changing(path) as files:
            return await files.write(path, chunks, mode=mode, overwrite=overwrite)

    def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._files().read(path, max_bytes=max_bytes)

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        return await self._files().list_dir(path)

    async def stat(self, path: str) -> FileInfo:
        if self.inside is not None:
            return await self.inside.stat(path)
        below = work_path(path, work_dir=self.work_dir, allow_root=True)
        tree = self._opened().work.tree
        return await threads.files.run(tree, tree.stat, below)

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        async with self._changing(path) as files:
            await files.make_dir(path, parents=parents, exist_ok=exist_ok)

    async def remove(self, path: str, *, recursive: bool) -> None:
        if self.inside is not None:
            async with self._changing(path):
                await self.inside.remove(path, recursive=recursive)
            return
        below = work_path(path, work_dir=self.work_dir)
        async with self._changing(path):
            tree = self._opened().work.tree
            await threads.files.run(tree, tree.remove, below, recursive=recursive)
