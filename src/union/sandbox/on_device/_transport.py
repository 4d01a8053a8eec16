"""LocalTransport: a session on this machine."""

from __future__ import annotations

import asyncio

# The loop would import it at the first use: without a descriptor left, a session could not close.
import concurrent.futures.thread  # noqa: F401
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import tempfile
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from union.sandbox._backends import registry
from union.sandbox._core.events import Started
from union.sandbox._core.paths import work_path
from union.sandbox._core.spec import RunSpec
from union.sandbox._core.view import RUN_DIR
from union.sandbox._linux import host, kernel
from union.sandbox._linux.ears import Ears
from union.sandbox._linux.failures import explain
from union.sandbox._linux.launcher import Channel, NamespaceRefusedError
from union.sandbox._linux.removal import remove_tree
from union.sandbox._linux.run import LocalRun, NotBuiltError, Sandbox
from union.sandbox._session.threads import in_thread, until_done
from union.sandbox._session.tree_files import TreeFiles
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError
from union.sandbox.on_device import _probe
from union.sandbox.on_device._command import CommandBuilder
from union.sandbox.on_device._network import open_doors, shape_of
from union.sandbox.on_device._posture import Posture
from union.sandbox.on_device._pythons import WaitingPythons, can_wait
from union.sandbox.on_device._sandboxes import Sandboxes
from union.sandbox.on_device._session_id import SessionId
from union.sandbox.on_device._venv import Venv
from union.sandbox.on_device._workdir import WorkDir

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterator

    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.events import Failed
    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.command import Command
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._workdir import WorkPlace

__all__ = ["LocalTransport"]

_CLONE, _CHDIR = 101, 110
_SETTLED_S: Final = {"python": 0.006}
_SETTLED_OTHER_S: Final = 0.002
"""A short command has ended by then. To listen to it, and to make the next sandboxes, would only
have slowed it."""
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_NOBODY_THERE: Final = (errno.EPIPE, errno.ECONNRESET)
_BUILD_AHEAD: Final = 4
_UNUSED: Final = 64
"""After so many commands of one kind in a row, what waits for the other is let go: as long as that
is there, no network of the session can be used again (native/network.c)."""
_log = logging.getLogger("union.sandbox")
_FIRST_INSIDE: Final = 2
"""The number of a command in its own pid namespace: the one after the sandbox's first process."""


_builders: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def _turn_to_build() -> asyncio.Semaphore:
    """Of a thousand sessions that are opened at once, a few build ahead at a time."""
    return _builders.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_BUILD_AHEAD))


class LocalTransport:
    """Runs commands as sandboxed child processes beside the caller."""

    def __init__(self, spec: SessionSpec, *, place: WorkPlace | None = None) -> None:
        self._spec = spec
        # What isolates nothing can show nothing under another name.
        bare_place = place and dataclasses.replace(place, shown_at=None)
        self._place = bare_place if spec.backend == "none" else place
        self._backend = registry.get(spec.backend)
        self._bare = spec.backend == "none"
        self._work: WorkDir | None = None
        self._ears: Ears | None = None
        self._channel: Channel | None = None
        self._postures: dict[NetworkShape, Posture] = {}
        self._facts = _probe.Facts()
        self._tried: set[NetworkShape] = set()
        self._own_id = SessionId()
        self._sandboxes = self._make_sandboxes()
        self._pythons = WaitingPythons(
            keep=0 if self._bare else min(spec.warm, 1), preload=spec.preload
        )
        self._runs: set[LocalRun] = set()
        self._in_a_row = (False, 0)
        """Whether the last commands were Python, and how many they are."""
        self._building = asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None
        self._scratch: str | None = None
        self._kept_venv: Venv | None = None
        self._is_venv_sure = False
        """Whether it was looked at since anybody could have changed it."""

    def _make_sandboxes(self) -> Sandboxes:
        keep = 0 if self._bare else self._spec.warm
        try:
            return Sandboxes(self._line, self._spec.limits, groups=self._wants_group(), keep=keep)
        except OSError as exc:
            raise self._spawn_failed("the session could not be opened", exc) from exc

    # Opening and closing.

    async def open(self) -> None:
        try:
            # First: if there is no descriptor for what comes next, this one is free to clean up.
            self._ears = Ears()
            self._work = WorkDir(self._spec.host_work_dir, self._place)
            if self._bare:
                self._scratch = tempfile.mkdtemp(prefix=f"sandbox-{os.getpid()}-scripts-")
            self._channel = Channel(self._ears)
            if not self._bare:
                await self._try_out(shape_of(self._spec.network))
        except OSError as exc:
            raise self._spawn_failed("the session could not be opened", exc) from exc

    def _spawn_failed(self, what: str, exc: OSError) -> SandboxExecutionError:
        if exc.errno == errno.ECHILD and self._channel is not None and self._channel.lost:
            exc = self._channel.end()  # nothing but the launcher is to blame
        why = exc.strerror or str(exc)
        if exc.errno in _NOBODY_THERE and why == os.strerror(exc.errno):
            why = "its sandbox ended before it could take it"
        return SandboxExecutionError(
            f"{what}: {why}",
            backend=self._spec.backend,
            stage="spawn",
            code=f"spawn-{errno.errorcode.get(exc.errno or 0, 'unknown')}",
            hint="raise the limit on open files (ulimit -n), or close sessions that are done"
            if exc.errno in _NO_DESCRIPTORS
            else "",
        )

    def _wants_group(self) -> bool:
        limits = self._spec.limits
        wanted = limits.memory_bytes is not None or limits.cpus is not None
        # The host's root is exempt from the process limit that everybody else obeys.
        return wanted or (kernel.is_root() and not self._bare and not kernel.can_map_mounts())

    async def _try_out(self, shape: NetworkShape) -> None:
        """Finds the facts for one shape of network, with one throw-away sandbox or a few."""
        self._facts = await _probe.settle(
            functools.partial(self._trial, shape),
            self._spec,
            without_bwrap=functools.partial(self._trial_without_bwrap, shape),
            opened=self._facts if self._tried else None,
        )
        self._posture(shape).check_ids(strict=self._spec.strict)
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
        shares = posture.plan.shared is not None
        what = _probe.Verified(
            backend=self._spec.backend,
            builder=posture.builder,
            network=shape,
            facts=facts,
            ids=posture.isolation.ids,
            device=self._dir().identity[0],
        )
        if shares and what in _probe.verified:
            # Its sandboxes differ from those that were looked at only in what they share. Unless
            # the caller added to that, opening need not wait for it; the first command does.
            if not self._shows_own_paths():
                self._ahead = self._ahead or asyncio.create_task(self._build_ahead(posture))
                return _probe.Outcome(None)
            outcome = await posture.build(self._line())
            if outcome.failure is None:
                self._keep_first(posture)
            else:
                self._postures.pop(shape).close()  # the next attempt looks paths up again
            return outcome
        outcome, sandbox = await self._look_at(posture)
        if sandbox is None:
            self._postures.pop(shape).close()
            return outcome
        if shares:
            _probe.verified.add(what)
        if self._sandboxes.is_plain:
            self._sandboxes.keep(posture, sandbox)
        else:
            sandbox.let_go()
        return outcome

    def _shows_own_paths(self) -> bool:
        spec = self._spec
        return bool(spec.host_work_dir or spec.read_only_paths or spec.read_write_paths)

    async def _build_ahead(self, posture: Posture) -> None:
        """Builds what sandboxes will share, and the first of them, while the caller goes on."""
        try:
            # A command of this session does not queue here: it takes the lock, and builds at once.
            async with _turn_to_build(), self._building:
                # A command that came before has built it, or found that it takes another posture.
                if self._postures.get(posture.shape) is not posture or posture.is_built:
                    return
                outcome = await posture.build(self._line())
                if outcome.failure is None:
                    self._keep_first(posture)
        except OSError:
            # The first command tries again, and says so if it cannot either.
            _log.debug("nothing could be built ahead", exc_info=True)

    def _keep_first(self, posture: Posture) -> None:
        if self._spec.warm and self._sandboxes.is_open:
            self._sandboxes.keep(posture, self._sandboxes.prepare(posture))

    async def _trial_without_bwrap(
        self, shape: NetworkShape, facts: _probe.Facts
    ) -> _probe.Outcome:
        """The same sandbox, built by the launcher alone."""
        facts = dataclasses.replace(facts, share=False)
        posture = self._make_posture(shape, registry.get("userns"), facts)
        try:
            outcome, sandbox = await self._look_at(posture)
            if sandbox is not None:
                sandbox.let_go()
            return outcome
        finally:
            posture.close()

    async def _look_at(self, posture: Posture) -> tuple[_probe.Outcome, Sandbox | None]:
        """How it went, and the sandbox if it went well."""
        line = self._line()
        outcome = await posture.build(line)
        if outcome.failure is not None:
            return outcome, None
        looked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number, sock = posture.prepare(line, pid=looked)
        try:
            outcome = await _probe.look(sock, looked, posture.isolation, owner=posture.owner)
        except BaseException:
            sock.close()
            raise
        sandbox = Sandbox(number, sock, line=line, owner=posture.owner)
        if outcome.failure is None:
            return outcome, sandbox
        sandbox.let_go()
        return dataclasses.replace(outcome, copied=posture.plan.shared is not None), None

    def _forget_postures(self) -> None:
        self._sandboxes.let_go()
        self._pythons.let_go()
        for posture in self._postures.values():
            posture.close()
        self._postures.clear()

    async def aclose(self) -> None:
        """Ends everything; once begun, it is finished also if whoever asked for it is cancelled."""
        self._sandboxes.close()
        if self._ahead is not None:
            self._ahead.cancel()
            await until_done(self._ahead)
        self._pythons.let_go()
        for run in tuple(self._runs):
            run.end_now("closed")
        if self._channel is not None:
            await until_done(self._channel.drain())
            for run in tuple(self._runs):
                run.end_now("closed")  # once more: the launcher may have died before it heard us
                await until_done(run.finished)
                run.abandon()
            self._channel.close()
        if self._ears is not None:
            self._ears.close()
        self._forget_postures()
        # Where the launcher was killed, nobody has waited for what it had started.
        groups = self._sandboxes.without_groups()
        await until_done(groups)
        self._own_id.release()
        loop = asyncio.get_running_loop()
        removals = []
        if self._scratch is not None:
            removals.append(loop.run_in_executor(None, remove_tree, self._scratch))
        if self._work is not None:
            removals.append(loop.run_in_executor(None, self._work.remove))
        await until_done(*removals)
        errors = [done.exception() for done in (*removals, groups)]
        for error in filter(None, errors):
            raise error

    def _dir(self) -> WorkDir:
        if self._work is None:
            raise RuntimeError("the transport is not open")
        return self._work

    def _line(self) -> Channel:
        if self._channel is None or self._ears is None:
            raise RuntimeError("the transport is not open")
        if not self._channel.is_usable:
            # The launcher died, and everything with it, or soon; the session itself is whole.
            self._sandboxes.let_go()
            self._pythons.let_go()
            self._channel.close()
            self._channel = Channel(self._ears)
        return self._channel

    @functools.cached_property
    def _commands(self) -> CommandBuilder:
        return CommandBuilder(
            work_dir=self.work_dir, limits=self._spec.limits, scratch=self._scratch
        )

    def _venv(self) -> Venv:
        if self._kept_venv is None:
            run_dir = self._scratch or RUN_DIR
            self._kept_venv = Venv(self._dir().tree, host.interpreter(), run_dir=run_dir)
        return self._kept_venv

    # Facts.

    @property
    def is_known(self) -> bool:
        return self._work is not None

    @property
    def work_dir(self) -> str:
        return self._dir().path

    @property
    def host_dir(self) -> str:
        """Where the work dir is on this host; a sandbox may see it under another name."""
        return self._dir().source

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
            posture = self._make_posture(shape, self._backend, self._facts)
            self._postures[shape] = posture
        return posture

    def _make_posture(self, shape: NetworkShape, backend: Backend, facts: _probe.Facts) -> Posture:
        if not self._sandboxes.is_open:
            # Of a command that was being started: nobody would close it any more.
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")
        return Posture(
            self._spec,
            shape,
            backend=backend,
            work=self._dir(),
            facts=facts,
            groups=self._sandboxes.groups,
            own=self._own_id,
        )

    async def _built(self, shape: NetworkShape) -> Posture:
        """A posture whose sandboxes are known to work here, with what they share built."""
        async with self._building:
            if shape not in self._tried:
                await self._try_out(shape)
            outcome = await self._posture(shape).build(self._line())
        if outcome.failure is not None:
            raise self._failed(explain(*outcome.failure, "", outcome.said.encode()))
        return self._posture(shape)

    def _failed(self, failed: Failed) -> SandboxExecutionError:
        return SandboxExecutionError(
            failed.reason,
            backend=self._spec.backend,
            stage=failed.stage,
            code=failed.code,
            hint=failed.hint,
        )

    # Running.

    async def start(self, spec: RunSpec, sink: Sink) -> LocalRun:
        if not self._is_venv_sure:
            await self._ensure_venv()
        self._is_venv_sure = False
        shape = shape_of(spec.network)
        try:
            posture = self._posture(shape)
            if not self._bare and (shape not in self._tried or not posture.is_built):
                posture = await self._built(shape)
            command = self._build(spec, posture)
            run = self._hand_over(posture, spec, command)
        except NotBuiltError as exc:
            raise self._failed(exc.failed) from exc
        except OSError as exc:
            raise self._spawn_failed("the command could not be handed over", exc) from exc
        if shape == "filtered" and not self._bare:
            run.on_doors = functools.partial(self._serve, run, spec, sink)
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._ended(run))
        self._sandboxes.watch_memory(run)
        if run.started is None:
            sink.event(Started(_FIRST_INSIDE))
        run.attach(sink, timeout_s=spec.timeout_s)
        settled = _SETTLED_S.get(spec.kind, _SETTLED_OTHER_S)
        asyncio.get_running_loop().call_later(settled, self._settled, run, posture, spec)
        if run.started is not None:
            try:
                await asyncio.shield(run.started)
            except asyncio.CancelledError:
                run.end_now("closed")
                raise
        if run.failure is not None and run.failure[0] & 0xFF == _CHDIR:
            raise SandboxUsageError(
                f"cwd={spec.cwd!r}: {os.strerror(run.failure[1])} inside the sandbox",
                argument="cwd",
                hint=f"the work dir is {self.work_dir}; paths outside need read_only_paths",
            )
        return run

    async def _ensure_venv(self) -> None:
        try:
            venv = self._venv()
            if venv.is_new and self._dir().is_ours:
                venv.ensure()  # nothing has run here yet, so it is a few small files
            elif not venv.is_as_seen():
                # What sandboxed code made of it can be large: others are served meanwhile.
                await in_thread(venv.ensure)
        except OSError as exc:
            raise self._spawn_failed("the venv could not be made", exc) from exc

    def _ended(self, run: LocalRun) -> None:
        self._runs.discard(run)
        if not self._runs and self._dir().is_ours:
            asyncio.get_running_loop().call_later(_SETTLED_OTHER_S, self._look_at_venv)

    def _look_at_venv(self) -> None:
        """Off the critical path: while nobody can change it, the next command need not look."""
        is_free = not self._runs and not self._pythons.are_any and self._sandboxes.is_open
        self._is_venv_sure = is_free and self._venv().is_as_seen()

    def _hand_over(self, posture: Posture, spec: RunSpec, command: Command) -> LocalRun:
        """Gives the command to a Python or a sandbox that waits, or to one that is made now."""
        self._line()  # what waits behind a line that was lost is not used
        if spec.kind == "python":
            waited = self._waiting_python(posture, spec, command)
            if waited is not None:
                return waited
        if spec.pty is None:
            run = self._sandboxes.take(posture)
        else:
            run = self._sandboxes.begin(posture, terminals=True)
        try:
            self._send(run, spec, command)
        except (BrokenPipeError, ConnectionResetError):
            # It died while it waited, so nothing was started; a new one is as good.
            run = self._sandboxes.begin(posture, terminals=spec.pty is not None)
            self._send(run, spec, command)
        return run

    def _send(self, run: LocalRun, spec: RunSpec, command: Command) -> None:
        # Only then can there be something to say that run() must wait for: our end of a terminal, a
        # missing program or directory, or a number that is not always the same.
        tell = spec.pty is not None or spec.kind == "argv" or spec.cwd is not None or self._bare
        pipes = (spec.stdout != "devnull", spec.stderr != "devnull")
        run.send(command, pipes=pipes, stdin=spec.stdin, pty=spec.pty, tell=tell)

    def _serve(self, run: LocalRun, spec: RunSpec, sink: Sink, fds: list[int]) -> None:
        run.close_doors = open_doors(spec.network, fds, sink.decision).aclose

    def _waiting_python(self, posture: Posture, spec: RunSpec, command: Command) -> LocalRun | None:
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

    def _settled(self, run: LocalRun, posture: Posture, spec: RunSpec) -> None:
        """The command has ended, or it takes longer: there is time for the rest."""
        run.listen()
        self._keep_ready(posture, spec)

    def _keep_ready(self, posture: Posture, spec: RunSpec) -> None:
        """Off the critical path: the next command finds a sandbox ready."""
        if self._postures.get(posture.shape) is not posture or not self._sandboxes.is_open:
            return
        try:
            self._make_ready(posture, spec)
        except OSError:
            # The next command makes its own, and says so if it cannot either.
            _log.debug("no sandbox could be made ahead", exc_info=True)

    def _make_ready(self, posture: Posture, spec: RunSpec) -> None:
        is_python = spec.kind == "python"
        last, count = self._in_a_row
        self._in_a_row = (is_python, count + 1 if last is is_python else 1)
        if self._in_a_row[1] == _UNUSED:
            (self._sandboxes if is_python else self._pythons).let_go()
            self._sandboxes.touch()
        if not is_python:
            self._sandboxes.fill(posture)
        elif posture.shape != "open" and self._pythons.wants(posture) and self._venv().is_as_seen():
            # A waiting Python runs what earlier runs left in the venv (.pth files), and so must not
            # have a network that a later, narrower run lacks. Filtered doors are not served yet.
            fingerprint = self._venv().fingerprint()
            plain = RunSpec(kind="python", env=self._spec.env, network=spec.network)
            command = self._build(plain, posture)._replace(script=None)
            ready = self._sandboxes.prepare(posture)
            run = self._pythons.add(posture, ready, command, fingerprint)
            self._sandboxes.watch_memory(run)  # from now on: it runs before it has a command
            self._is_venv_sure = False  # what is in the venv runs in it before it waits
            self._sandboxes.touch(self._let_pythons_go)

    def _let_pythons_go(self) -> None:
        self._pythons.let_go()

    def _build(self, spec: RunSpec, posture: Posture) -> Command:
        return self._commands.build(
            spec, carried=posture.carried, count_processes=posture.counts_processes
        )

    # Files.

    def _files(self) -> TreeFiles:
        return TreeFiles(self._dir().tree, work_dir=self.work_dir)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[TreeFiles]:
        """What the caller changes may be the venv: the next command has to look at it."""
        try:
            yield self._files()
        finally:
            self._is_venv_sure = False

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        with self._changing() as files:
            return await files.put(path, data, mode=mode, overwrite=overwrite)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._files().get(path, max_bytes=max_bytes)

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        with self._changing() as files:
            return await files.write(path, chunks, mode=mode, overwrite=overwrite)

    def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._files().read(path, max_bytes=max_bytes)

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        return await self._files().list_dir(path)

    async def stat(self, path: str) -> FileInfo:
        below = work_path(path, work_dir=self.work_dir, allow_root=True)
        return await in_thread(self._dir().tree.stat, below)

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        with self._changing() as files:
            await files.make_dir(path, parents=parents, exist_ok=exist_ok)

    async def remove(self, path: str, *, recursive: bool) -> None:
        below = work_path(path, work_dir=self.work_dir)
        with self._changing():
            await in_thread(self._dir().tree.remove, below, recursive=recursive)
