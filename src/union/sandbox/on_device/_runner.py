"""Running: give a command a sandbox, follow it to its end, keep the venv whole between commands."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Started
from union.sandbox._linux import host
from union.sandbox._linux.protocol import FailurePlace, operation
from union.sandbox._linux.run import LocalRun, NotBuiltError
from union.sandbox._plan.rootfs import RUN_DIR
from union.sandbox._session import threads
from union.sandbox._session.threads import until_done
from union.sandbox.errors import SandboxExecutionError, SandboxUsageError
from union.sandbox.on_device._call_postures import CallPostures
from union.sandbox.on_device._command import CommandBuilder
from union.sandbox.on_device._network import shape_of
from union.sandbox.on_device._venv import Venv

if TYPE_CHECKING:
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._linux.command import Command
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._bring_up import Postures
    from union.sandbox.on_device._network import SessionNetwork
    from union.sandbox.on_device._pool import Pool
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Runner"]

_SETTLED_S: Final = {"python": 0.006}
_SETTLED_OTHER_S: Final = 0.002
"""A short command has ended by then. To read its output, and to make the next sandboxes, would only
have slowed it."""
_FIRST_INSIDE: Final = 2
"""The number of a command in its own pid namespace: the one after the sandbox's first process."""


class Runner:
    """Starts the commands of one session and ends them."""

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
        self._is_venv_sure = False
        """Whether the venv was checked after the last time that anything could have changed it."""

    @functools.cached_property
    def _commands(self) -> CommandBuilder:
        programs = self._postures.programs
        return CommandBuilder(
            work_dir=self._work.path,
            limits=self._spec.limits,
            scratch=self._scratch,
            uv=programs.uv if programs else "",
        )

    @functools.cached_property
    def _venv(self) -> Venv:
        return Venv(self._work.tree, host.interpreter(), run_dir=self._scratch or RUN_DIR)

    @functools.cached_property
    def _calls(self) -> CallPostures:
        return CallPostures(self._spec, postures=self._postures, pool=self._pool)

    def forget_venv(self) -> None:
        """Have the next command check the venv: the caller may have changed it."""
        self._is_venv_sure = False

    async def start(self, spec: RunSpec, sink: Sink) -> LocalRun:
        """Start one command; see ``Transport.start``."""
        if not self._is_venv_sure:
            await self._ensure_venv()
        self._is_venv_sure = False
        pool = self._pool
        shape = shape_of(spec.network)
        try:
            if spec.call is None:
                posture = self._postures.get(shape)
                if not pool.is_bare and not self._postures.is_ready(posture):
                    posture = await self._postures.ready(shape)
                run = self._hand_over(posture, spec)
            else:
                async with self._calls.posture(shape, spec.call) as posture:
                    run = self._hand_over(posture, spec)
            if shape == "filtered" and not pool.is_bare:
                run.on_listeners = functools.partial(self._serve, run, spec, sink)
            # Reports arrive in later turns of the loop, so nothing is missed or comes too early.
            run.attach(sink, timeout_s=spec.timeout_s)
        except NotBuiltError as exc:
            raise self._not_built(exc) from exc
        except OSError as exc:
            raise pool.spawn_failed("the command could not be handed over", exc) from exc
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._ended(run))
        if spec.call is not None:
            end = self._work.keep_during_call(posture.read_only)
            run.finished.add_done_callback(lambda _: end())
        pool.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        if run.started is None:
            sink.event(Started(_FIRST_INSIDE))
        settled = _SETTLED_S.get(spec.kind, _SETTLED_OTHER_S)
        asyncio.get_running_loop().call_later(settled, self._settled, run, posture, spec)
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
                hint=f"the work dir is {self._work.path}; paths outside need read_only_paths",
            )
        return run

    def _serve(self, run: LocalRun, spec: RunSpec, sink: Sink, fds: list[int]) -> None:
        run.close_listeners = self._network.open(spec.network, fds, sink.decision).aclose

    def _hand_over(self, posture: Posture, spec: RunSpec) -> LocalRun:
        command = self._build(spec, posture)
        return self._pool.hand_over(posture, spec, command, work=self._work, venv=self._venv)

    def _not_built(self, exc: NotBuiltError) -> SandboxExecutionError:
        failed = exc.failed
        return SandboxExecutionError(
            failed.reason,
            backend=self._spec.backend,
            stage=failed.stage,
            code=failed.code,
            hint=failed.hint,
        )

    async def _ensure_venv(self) -> None:
        try:
            if self._venv.is_new and self._work.is_ours:
                self._venv.ensure()  # nothing has run here yet, so it is a few small files
            elif not self._venv.is_as_seen():
                # Sandboxed code can make it large: other commands are served meanwhile.
                await threads.files.run(self._work.tree, self._venv.ensure)
        except OSError as exc:
            raise self._pool.spawn_failed("the venv could not be made", exc) from exc

    def _ended(self, run: LocalRun) -> None:
        self._runs.discard(run)
        if not self._runs and self._work.is_ours:
            asyncio.get_running_loop().call_later(_SETTLED_OTHER_S, self._check_venv)

    def _check_venv(self) -> None:
        """Off the critical path: while nothing can change the venv, the next command trusts it."""
        pool = self._pool
        is_free = not self._runs and not pool.pythons.are_any and pool.sandboxes.is_open
        self._is_venv_sure = is_free and self._venv.is_as_seen()

    def _settled(self, run: LocalRun, posture: Posture, spec: RunSpec) -> None:
        """The command has ended, or it takes longer: there is time for the rest."""
        run.listen()
        if not self._postures.is_current(posture) or not self._pool.sandboxes.is_open:
            return
        if self._pool.fill(posture, spec, venv=self._venv, build=self._build):
            self._is_venv_sure = False  # what is in the venv runs in a Python before it waits

    def _build(self, spec: RunSpec, posture: Posture) -> Command:
        return self._commands.build(
            spec, carried=posture.carried, count_processes=posture.counts_processes
        )

    def end_all(self) -> None:
        """Kill every command of the session."""
        for run in tuple(self._runs):
            run.end_now("closed")

    def close_postures(self) -> None:
        """Drop the postures of the session and of single calls."""
        if "_calls" in self.__dict__:
            self._calls.close()
        self._postures.close()

    async def all_ended(self, *, is_stuck: bool) -> None:
        """Wait for the end of every command, with the channel drained.

        Args:
            is_stuck: The channel could not be drained in time: do not wait for killed processes.

        """
        for run in tuple(self._runs):
            run.end_now("closed")  # once more: the launcher may have died before it read the first
            if is_stuck:
                run.give_up_killed()
            await until_done(run.finished)
            run.abandon()
