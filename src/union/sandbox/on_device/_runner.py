"""Run commands: assign a sandbox, follow the command to its end, verify the venv in between."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._core.spec import RunSpec
from union.sandbox._linux import host
from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.machine_run import MachineRun, announce
from union.sandbox._linux.prepared import NotBuiltError
from union.sandbox._linux.protocol import FailurePlace, operation
from union.sandbox._linux.removal import remove_tree
from union.sandbox._plan.rootfs import RUN_DIR
from union.sandbox._policy.entries import has_http
from union.sandbox._session import threads
from union.sandbox._session.threads import until_done
from union.sandbox.errors import SandboxUsageError
from union.sandbox.on_device._call_postures import CallPostures
from union.sandbox.on_device._command import CommandBuilder
from union.sandbox.on_device._counter_guard import CounterGuard
from union.sandbox.on_device._follow_ups import FollowUps
from union.sandbox.on_device._network import shape_of
from union.sandbox.on_device._run_network import serve_network
from union.sandbox.on_device._start_gate import StartGate
from union.sandbox.on_device._trust import Trust
from union.sandbox.on_device._venv import Venv

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.run import LocalRun
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._bring_up import Postures
    from union.sandbox.on_device._network import SessionNetwork
    from union.sandbox.on_device._pool import Pool
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Runner"]

_log = logging.getLogger("union.sandbox")
_CHECK_VENV_S: Final = 0.002
"""Delay after the last command, in which its caller receives the answer first."""


class Runner:
    """Start and end the commands of one session."""

    def __init__(
        self,
        spec: SessionSpec,
        *,
        work: WorkDir,
        scratch: str | None,
        pool: Pool,
        postures: Postures,
        network: SessionNetwork,
    ) -> None:
        self._spec = spec
        self._work = work
        self._scratch = scratch
        self._pool = pool
        self._postures = postures
        self._network = network
        self._runs: set[LocalRun] = set()
        self._helpers: set[LocalRun] = set()
        self._interpreters: set[LocalRun] = set()
        """The runs of contexts."""
        self._removals: set[asyncio.Future[None]] = set()
        self._timing = FollowUps()
        self.gate = StartGate()
        """Holds back new commands while a checkpoint is taken."""
        self._is_venv_verified = False
        """Whether the venv was verified after anything could have changed it."""
        self._counters = CounterGuard(
            running=lambda: self._runs,
            waiting=lambda: (*pool.pythons.runs(), *pool.drivers.runs()),
            machine=lambda: postures.machine,
        )
        pool.sandboxes.on_idle = self._rest
        pool.on_late_python = self.forget_venv  # it executes code of the venv before it waits

    @functools.cached_property
    def _commands(self) -> CommandBuilder:
        programs = self._postures.programs
        return CommandBuilder(
            work_dir=self._work.path,
            limits=self._spec.limits,
            scratch=self._scratch,
            tmp_dir=self._work.tmp_dir,
            uv=programs.uv if programs else "",
            shell=self._spec.shell,
        )

    @functools.cached_property
    def _venv(self) -> Venv:
        return Venv(
            self._work.tree,
            host.interpreter(),
            run_dir=self._scratch or RUN_DIR,
            is_kept=not self._work.is_private,
        )

    @functools.cached_property
    def _calls(self) -> CallPostures:
        return CallPostures(self._spec, postures=self._postures, pool=self._pool)

    def _rest(self) -> None:
        """Release what the next command can have again: an idle session keeps little open."""
        self.forget_venv()
        if "_venv" in self.__dict__:
            self._venv.rest()

    @functools.cached_property
    def trust(self) -> Trust:
        """The certificates that programs inside trust, for ``Http`` entries."""
        return Trust(self._work, self._network.interception())

    def forget_venv(self) -> None:
        """Make the next command verify the venv, which the caller may have changed."""
        self._is_venv_verified = False

    async def start(self, spec: RunSpec, sink: Sink) -> LocalRun:
        """Start one command; see ``Transport.start``."""
        if not self.gate.enter():
            await self.gate.wait()
        try:
            shape = shape_of(spec.network)
            if shape == "filtered" or not self._is_venv_verified:
                await self._verify(spec)
            self._is_venv_verified = False
            try:
                if spec.call is None:
                    posture = self._postures.usable(shape) or await self._postures.ready(shape)
                    run = self._hand_over(posture, spec)
                else:
                    async with self._calls.posture(shape, spec.call) as posture:
                        run = self._hand_over(posture, spec)
                if shape == "filtered":
                    serve_network(run, spec, sink, network=self._network, pool=self._pool)
                # Reports arrive in later iterations of the event loop, so none is missed here.
                run.attach(sink, timeout_s=spec.timeout_s)
            except NotBuiltError as exc:
                raise self._pool.not_built(exc) from exc
            except OSError as exc:
                raise self._pool.spawn_failed("the command could not be started", exc) from exc
            await self._accompany(run, posture, spec, sink)
            return run
        finally:
            self.gate.leave()

    async def _accompany(self, run: LocalRun, posture: Posture, spec: RunSpec, sink: Sink) -> None:
        """Do what follows the start of a command, and wait for its report if there is one."""
        pool = self._pool
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._on_end(run))
        if spec.call is not None:
            end = self._work.keep_during_call(posture.read_only)
            run.finished.add_done_callback(lambda _: end())
        pool.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        if posture.shares_counters:
            self._counters.wake()
        announce(run, sink)
        forks = spec.kind == "python" and pool.template.is_ready
        follow_up = functools.partial(self._follow_up, run, posture, spec)
        self._timing.schedule(run, spec.kind, follow_up, forks=forks, others=len(self._runs) - 1)
        if run.started is not None:
            try:
                await asyncio.shield(run.started)
            except asyncio.CancelledError:
                run.end_now("closed")
                raise
        if run.failure is not None and operation(run.failure[0]) == FailurePlace.CHDIR:
            raise SandboxUsageError(
                f"cwd={spec.cwd!r}: {os.strerror(run.failure[1])} inside the sandbox",
                argument="cwd",
                hint=f"the work dir is {self._work.path}; other paths need read_only_paths",
            )

    async def start_interpreter(
        self,
        spec: RunSpec,
        sink: Sink,
        *,
        send: Callable[[Posture, Command, Venv], tuple[LocalRun, socket.socket]],
        on_listeners: Callable[[list[int]], None],
    ) -> tuple[LocalRun, socket.socket, Posture]:
        """Start a program that stays alive and is driven through its own socket.

        Args:
            spec: the command; the shape of its network is that of the sandbox.
            sink: receives its events and output.
            send: sends the command to a sandbox of the posture; returns the run and the socket.
            on_listeners: receives the listening sockets of a filtered network.

        """
        async with self.gate:
            await self._verify(spec)
            self._is_venv_verified = False
            shape = shape_of(spec.network)
            try:
                posture = self._postures.usable(shape) or await self._postures.ready(shape)
                run, near = send(posture, self._build(spec, posture), self._venv)
                try:
                    if shape == "filtered":
                        run.on_listeners = on_listeners
                    run.attach(sink, timeout_s=None)
                except BaseException:
                    near.close()
                    raise
            except NotBuiltError as exc:
                raise self._pool.not_built(exc) from exc
            except OSError as exc:
                raise self._pool.spawn_failed("the context could not be started", exc) from exc
            self._runs.add(run)
            self._interpreters.add(run)
            run.finished.add_done_callback(lambda _: self._on_end(run))
            self._pool.sandboxes.watch_memory(run, posture.limits.memory_bytes)
            if posture.shares_counters:
                self._counters.wake()
            run.listen()
            return run, near, posture

    async def start_helper(
        self, argv: tuple[str, ...], sock: socket.socket, sink: Sink
    ) -> LocalRun:
        """Start a program of the product's own in the machine, with ``sock`` as its stdin.

        It has the rights of a command, a blocked network, and is not listed as a process. It ends
        with the session, or when the run is ended. The caller closes ``sock``, the far end.
        """
        spec = RunSpec(
            kind="argv", argv=argv, env=self._spec.env, stdout="devnull", stderr="devnull"
        )

        def send(posture: Posture, command: Command, _venv: Venv) -> tuple[LocalRun, socket.socket]:
            run = self._pool.sandboxes.take(posture)
            run.send(command, pipes=(False, False), stdin=sock.fileno())
            return run, sock

        run, _, _ = await self.start_interpreter(spec, sink, send=send, on_listeners=close_all)
        self._helpers.add(run)
        run.finished.add_done_callback(lambda _: self._helpers.discard(run))
        return run

    def labels(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the labels of commands in the machine that run, and of the product's own."""
        running = {run.sandbox.label for run in self._runs - self._helpers}
        own = {run.sandbox.label for run in (*self._helpers, *self._pool.sandboxes.waiting())}
        return frozenset(running), frozenset(own - {0})

    def keep_driver(self, posture: Posture, spec: RunSpec) -> None:
        """Start the driver of a next context ahead, unless the session is closing."""
        is_open = self._pool.sandboxes.is_open and not self.gate.is_closed
        if not is_open or not self._postures.is_current(posture):
            return
        command = self._build(spec, posture)._replace(script=None)
        if self._pool.fill_driver(posture, command, venv=self._venv):
            self._is_venv_verified = False  # it executes code of the venv before it waits

    @property
    def pool(self) -> Pool:
        """The sandboxes of the session."""
        return self._pool

    def _hand_over(self, posture: Posture, spec: RunSpec) -> LocalRun:
        pool = self._pool
        if pool.is_machine and (machine := self._postures.machine) is not None:
            machine.check_alive()
        command = self._build(spec, posture)
        run = pool.hand_over(posture, spec, command, work=self._work, venv=self._venv)
        if pool.is_machine and isinstance(run, MachineRun):
            run.keeps_network = spec.background
        return run

    async def _verify(self, spec: RunSpec) -> None:
        try:
            if not self._is_venv_verified:
                if self._venv.is_new and self._work.is_private:
                    self._venv.ensure()  # a few small files, as nothing has run here yet
                elif not self._venv.is_unchanged():
                    # Sandboxed code can make it large, so this must not block the event loop.
                    await threads.files.run(self._work.tree, self._venv.ensure)
            if has_http(spec.network):
                await self.trust.ready()
        except OSError as exc:
            raise self._pool.spawn_failed("the venv could not be made", exc) from exc

    def _on_end(self, run: LocalRun) -> None:
        self._runs.discard(run)
        self._timing.note_end(run)
        self._interpreters.discard(run)
        if run.sandbox.directory is not None:
            self._remove_later(run.sandbox.directory)
        if not self._runs and self._work.is_private:
            run.finished.get_loop().call_later(_CHECK_VENV_S, self._check_venv)

    def _remove_later(self, directory: str) -> None:
        """Remove the directory of one run in a thread; what is left goes with the session."""
        try:
            done = threads.removal.start(self, functools.partial(remove_tree, directory))
        except threads.PoolFullError:
            return
        self._removals.add(done)
        done.add_done_callback(self._on_removed)

    def _on_removed(self, done: asyncio.Future[None]) -> None:
        self._removals.discard(done)
        if not done.cancelled() and done.exception() is not None:
            _log.debug("the directory of a run stays until the end: %s", done.exception())

    def _check_venv(self) -> None:
        """Verify the venv between commands, so that the next one need not."""
        pool = self._pool
        is_waiting = pool.pythons.has_any or pool.drivers.has_any
        is_free = not self._runs and not is_waiting and pool.sandboxes.is_open
        self._is_venv_verified = is_free and self._venv.is_unchanged()

    def _follow_up(self, run: LocalRun, posture: Posture, spec: RunSpec) -> None:
        """Read the output of a command that runs on, and prepare a spare for the next one."""
        run.listen()
        is_open = self._pool.sandboxes.is_open and not self.gate.is_closed
        if not is_open or not self._postures.is_current(posture):
            return
        if self._pool.fill(posture, spec, venv=self._venv, build=self._build):
            # The new Python executes code of the venv before it waits.
            self._is_venv_verified = False

    def _build(self, spec: RunSpec, posture: Posture) -> Command:
        return self._commands.build(
            spec,
            host_env=posture.host_env,
            count_processes=posture.counts_processes,
            shares_id=posture.shares_id,
        )

    def running(self) -> list[LocalRun]:
        """Return the commands and contexts that have not ended."""
        return [run for run in self._runs - self._helpers if not run.has_ended]

    def forget_tree(self) -> None:
        """Use the new work tree from now on, and build postures of calls again."""
        self.forget_venv()
        self.__dict__.pop("_venv", None)
        if "_calls" in self.__dict__:
            self._calls.close()

    async def idle(self, *, keeps_contexts: bool = False) -> None:
        """Wait until every command of the session has ended and was released.

        ``exec()`` returns when a command has reported its end, a few iterations of the event loop
        before its run is released. Processes killed from outside may exit a bit later.
        """
        while runs := self._ending(keeps_contexts=keeps_contexts):
            # The callback that removes a run comes before this one.
            await asyncio.wait([run.finished for run in runs])

    def end_all(self, *, keeps_contexts: bool = False, for_good: bool = False) -> None:
        """Kill every command, and the contexts unless kept; ``for_good`` if the session closes."""
        if for_good:
            self._counters.close()
        for run in self._ending(keeps_contexts=keeps_contexts):
            run.end_now("closed")

    def _ending(self, *, keeps_contexts: bool) -> tuple[LocalRun, ...]:
        return tuple(self._runs - self._interpreters if keeps_contexts else self._runs)

    def close_postures(self) -> None:
        """Close the postures of the session and of single calls."""
        if "_calls" in self.__dict__:
            self._calls.close()
        self._postures.close()

    async def all_ended(self, *, is_stuck: bool) -> None:
        """Wait for the end of every command, with the channel drained.

        With ``is_stuck``, it was not drained in time: killed processes are not waited for.
        """
        for run in tuple(self._runs):
            # Again, because the launcher may have died before it read the first request.
            run.end_now("closed")
            if is_stuck:
                run.give_up_killed()
            await until_done(run.finished)
            run.output.abandon()
        await until_done(*self._removals)
