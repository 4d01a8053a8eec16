"""LocalTransport: a session on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import os
import tempfile
import warnings
from typing import TYPE_CHECKING

from union.sandbox._backends import registry
from union.sandbox._core.events import Started
from union.sandbox._core.paths import work_path
from union.sandbox._core.spec import RunSpec
from union.sandbox._core.view import RUN_DIR
from union.sandbox._linux import host, kernel
from union.sandbox._linux.launcher import Channel, NamespaceRefusedError
from union.sandbox._linux.removal import remove_tree
from union.sandbox._linux.run import LocalRun, Sandbox
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError
from union.sandbox.on_device import _probe
from union.sandbox.on_device._command import CommandBuilder
from union.sandbox.on_device._network import open_doors, shape_of
from union.sandbox.on_device._posture import Posture
from union.sandbox.on_device._pythons import WaitingPythons, can_wait
from union.sandbox.on_device._sandboxes import Sandboxes
from union.sandbox.on_device._venv import Venv
from union.sandbox.on_device._workdir import WorkDir

if TYPE_CHECKING:
    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.run import Command
    from union.sandbox._session.transport import Sink

__all__ = ["LocalTransport"]

_CLONE, _CHDIR = 101, 110


class LocalTransport:
    """Runs commands as sandboxed child processes beside the caller."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._backend = registry.get(spec.backend)
        self._bare = spec.backend == "none"
        self._work: WorkDir | None = None
        self._channel: Channel | None = None
        self._postures: dict[NetworkShape, Posture] = {}
        self._facts = _probe.Facts()
        self._tried: set[NetworkShape] = set()
        self._sandboxes = Sandboxes(
            self._line,
            spec.limits,
            groups=self._wants_group(),
            keep=0 if self._bare else spec.warm,
        )
        self._pythons = WaitingPythons(
            keep=0 if self._bare else min(spec.warm, 1), preload=spec.preload
        )
        self._runs: set[LocalRun] = set()
        self._scratch: str | None = None
        self._kept_venv: tuple[tuple[int, int] | None, Venv] | None = None

    # Opening and closing.

    async def open(self) -> None:
        if self._bare:
            warnings.warn(
                "backend='none' isolates nothing: commands run with all of this process's rights",
                UserWarning,
                stacklevel=4,
            )
        self._work = WorkDir(self._spec.host_work_dir)
        if self._bare:
            self._scratch = tempfile.mkdtemp(prefix=f"sandbox-{os.getpid()}-scripts-")
        self._venv().ensure()
        self._channel = Channel()
        if not self._bare:
            await self._try_out(shape_of(self._spec.network))

    def _wants_group(self) -> bool:
        limits = self._spec.limits
        wanted = limits.memory_bytes is not None or limits.cpus is not None
        # The host's root is exempt from the process limit that everybody else obeys.
        return wanted or (kernel.is_root() and not self._bare and not kernel.can_map_mounts())

    async def _try_out(self, shape: NetworkShape) -> None:
        """Finds the facts for one shape of network, with one throw-away sandbox or a few."""
        tried = functools.partial(self._trial, shape)
        self._facts = await _probe.settle(tried, self._spec)
        self._tried.add(shape)

    async def _trial(self, shape: NetworkShape, facts: _probe.Facts) -> _probe.Outcome:
        """One sandbox with this session's own plan, looked at from outside."""
        if facts != self._facts:
            self._facts = facts
            self._forget_postures()
        try:
            posture = self._posture(shape)
        except NamespaceRefusedError as exc:
            return _probe.Outcome((_CLONE, exc.errno or 0))
        looked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number, sock = self._line().prepare(
            posture.plan, posture.encoded, fds=posture.fds, on_pid=looked.set_result
        )
        try:
            outcome = await _probe.look(sock, looked, posture.isolation)
        except BaseException:
            sock.close()
            raise
        if outcome.failure is None and self._sandboxes.is_plain:
            kill = self._line().kill
            self._sandboxes.keep(posture, Sandbox(number, sock, kill=kill, owner=posture.owner))
        else:
            sock.close()
        return outcome

    def _forget_postures(self) -> None:
        self._sandboxes.let_go()
        self._pythons.let_go()
        for posture in self._postures.values():
            posture.close()
        self._postures.clear()

    async def aclose(self) -> None:
        self._sandboxes.close()
        self._pythons.let_go()
        for run in tuple(self._runs):
            run.end_now("closed")
        if self._channel is not None:
            await self._channel.drain()
            for run in tuple(self._runs):
                await run.finished
                run.abandon()
            self._channel.close()
        self._forget_postures()
        if self._scratch is not None:
            await asyncio.to_thread(remove_tree, self._scratch)
        if self._work is not None:
            await asyncio.to_thread(self._work.remove)

    def _dir(self) -> WorkDir:
        if self._work is None:
            raise RuntimeError("the transport is not open")
        return self._work

    def _line(self) -> Channel:
        if self._channel is None:
            raise RuntimeError("the transport is not open")
        if self._channel.lost:
            # The launcher died, and everything with it; the session itself is whole.
            self._channel.close()
            self._channel = Channel()
        return self._channel

    @property
    def _commands(self) -> CommandBuilder:
        return CommandBuilder(
            work_dir=self.work_dir, limits=self._spec.limits, scratch=self._scratch
        )

    def _venv(self) -> Venv:
        owner = self._owner()
        if self._kept_venv is None or self._kept_venv[0] != owner:
            run_dir = self._scratch or RUN_DIR
            venv = Venv(self._dir().tree, host.interpreter(), owner=owner, run_dir=run_dir)
            self._kept_venv = (owner, venv)
        return self._kept_venv[1]

    def _owner(self) -> tuple[int, int] | None:
        """Who files made by the host must belong to, if not the caller."""
        return self._dir().owner if kernel.is_root() else None

    # Facts.

    @property
    def work_dir(self) -> str:
        return self._dir().path

    @property
    def isolation(self) -> Isolation:
        return self._posture(shape_of(self._spec.network)).isolation

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        view = self._posture(shape_of(self._spec.network)).view
        read_only = [s.path for s in (*view.system, *view.added) if not s.writable]
        writable = [s.path for s in view.added if s.writable]
        return {
            "read_only": tuple(sorted(read_only)),
            "read_write": ("/dev/shm", "/tmp", *sorted(writable)),  # noqa: S108 - names inside
        }

    def _posture(self, shape: NetworkShape) -> Posture:
        posture = self._postures.get(shape)
        if posture is None:
            posture = self._postures[shape] = Posture(
                self._spec,
                shape,
                backend=self._backend,
                work=self._dir(),
                facts=self._facts,
                groups=self._sandboxes.groups,
            )
        return posture

    # Running.

    async def start(self, spec: RunSpec, sink: Sink) -> LocalRun:
        shape = shape_of(spec.network)
        if shape == "filtered" and shape not in self._tried and not self._bare:
            await self._try_out(shape)
        posture = self._posture(shape)
        self._venv().ensure()
        command = self._build(spec, posture)
        try:
            run, sandbox = self._hand_over(posture, spec, command)
        except OSError as exc:
            raise SandboxExecutionError(
                f"the command could not be handed over: {exc.strerror}",
                backend=self._spec.backend,
                stage="spawn",
                code=f"spawn-{errno.errorcode.get(exc.errno or 0, 'unknown')}",
                hint="raise the limit on open files (ulimit -n)"
                if exc.errno in {errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS}
                else "",
            ) from exc
        if shape == "filtered" and not self._bare:
            run.on_doors = functools.partial(self._serve, run, spec, sink)
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._runs.discard(run))
        self._sandboxes.watch_memory(run, sandbox)
        if run.started.done():
            sink.event(Started(run.pid))
        run.attach(sink, timeout_s=spec.timeout_s)
        if not run.started.done():
            try:
                await asyncio.shield(run.started)
            except asyncio.CancelledError:
                run.end_now("closed")
                raise
        asyncio.get_running_loop().call_soon(self._keep_ready, posture, spec)
        if run.failure is not None and run.failure[0] & 0xFF == _CHDIR:
            raise SandboxUsageError(
                f"cwd={spec.cwd!r}: {os.strerror(run.failure[1])} inside the sandbox",
                argument="cwd",
                hint=f"the work dir is {self.work_dir}; paths outside need read_only_paths",
            )
        return run

    def _hand_over(
        self, posture: Posture, spec: RunSpec, command: Command
    ) -> tuple[LocalRun, Sandbox]:
        """Gives the command to a Python or a sandbox that waits, or to one that is made now."""
        waited = self._waiting_python(posture, spec, command)
        if waited is not None:
            return waited
        pipes = (spec.stdout != "devnull", spec.stderr != "devnull")
        sandbox = self._sandboxes.take(posture)
        run = LocalRun(sandbox, pipes=pipes, isolation=posture.isolation)
        try:
            run.send(command, stdin=spec.stdin)
        except (BrokenPipeError, ConnectionResetError):
            # It died while it waited, so nothing was started; a new one is as good.
            sandbox = self._sandboxes.prepare(posture)
            run = LocalRun(sandbox, pipes=pipes, isolation=posture.isolation)
            run.send(command, stdin=spec.stdin)
        return run, sandbox

    def _serve(self, run: LocalRun, spec: RunSpec, sink: Sink, fds: list[int]) -> None:
        run.close_doors = open_doors(spec.network, fds, sink.decision).aclose

    def _waiting_python(
        self, posture: Posture, spec: RunSpec, command: Command
    ) -> tuple[LocalRun, Sandbox] | None:
        if self._bare or not can_wait(spec) or not self._is_dir(spec.cwd):
            return None
        return self._pythons.take(posture, command, self._venv().fingerprint())

    def _is_dir(self, cwd: str | None) -> bool:
        """Whether a working directory is surely there; if not, a fresh start tells best."""
        if cwd is None:
            return True
        try:
            self._dir().tree.check_dir(
                work_path(cwd, work_dir=self.work_dir, argument="cwd", allow_root=True)
            )
        except SandboxError:
            return False
        return True

    def _keep_ready(self, posture: Posture, spec: RunSpec) -> None:
        """Off the critical path: the next command finds a sandbox ready."""
        if self._postures.get(posture.shape) is not posture or not self._sandboxes.is_open:
            return
        if spec.kind != "python":
            self._sandboxes.keep(posture)
        elif posture.shape != "open" and self._pythons.wants(posture):
            # A waiting Python runs what earlier runs left in the venv (.pth files), and so must not
            # have a network that a later, narrower run lacks. Filtered doors are not served yet.
            fingerprint = self._venv().fingerprint()
            plain = RunSpec(kind="python", env=self._spec.env, network=spec.network)
            command = dataclasses.replace(self._build(plain, posture), script=None)
            self._pythons.add(posture, self._sandboxes.prepare(posture), command, fingerprint)
            self._sandboxes.touch(self._let_pythons_go)

    def _let_pythons_go(self) -> None:
        self._pythons.let_go()

    def _build(self, spec: RunSpec, posture: Posture) -> Command:
        return self._commands.build(spec, ca=posture.ca, count_processes=posture.counts_processes)

    # Files.

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        relative = work_path(path, work_dir=self.work_dir)
        tree, owner = self._dir().tree, self._owner()
        return await asyncio.to_thread(
            tree.put, relative, data, mode=mode, overwrite=overwrite, owner=owner
        )

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        relative = work_path(path, work_dir=self.work_dir)
        return await asyncio.to_thread(self._dir().tree.get, relative, max_bytes=max_bytes)
