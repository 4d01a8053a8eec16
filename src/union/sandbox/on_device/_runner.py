"""Run commands: assign a sandbox, follow the command to its end, verify the venv in between."""

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

_FOLLOW_UP_S: Final = {"python": 0.006}
_FOLLOW_UP_OTHER_S: Final = 0.002
"""Delay before output is read and the next spare is prepared. A short command has ended by then;
doing this work earlier would slow it down."""
_FIRST_INSIDE: Final = 2
"""The pid of a command in its pid namespace, next to the sandbox's first process."""


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
        self._is_venv_verified = False
        """Whether the venv was verified after anything could have changed it."""

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
        """Make the next command verify the venv, which the caller may have changed."""
        self._is_venv_verified = False

    async def start(self, spec: RunSpec, sink: Sink) -> LocalRun:
        """Start one command; see ``Transport.start``."""
        if not self._is_venv_verified:
            await self._ensure_venv()
        self._is_venv_verified = False
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
                run.on_listeners = functools.partial(self._open_egress, run, spec, sink)
            # Reports arrive in later iterations of the event loop, so none is missed here.
            run.attach(sink, timeout_s=spec.timeout_s)
        except NotBuiltError as exc:
            raise self._not_built(exc) from exc
        except OSError as exc:
            raise pool.spawn_failed("the command could not be started", exc) from exc
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._on_end(run))
        if spec.call is not None:
            end = self._work.keep_during_call(posture.read_only)
            run.finished.add_done_callback(lambda _: end())
        pool.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        if run.started is None:
            sink.event(Started(_FIRST_INSIDE))
        delay_s = _FOLLOW_UP_S.get(spec.kind, _FOLLOW_UP_OTHER_S)
        asyncio.get_running_loop().call_later(delay_s, self._follow_up, run, posture, spec)
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
        return run

    def _open_egress(self, run: LocalRun, spec: RunSpec, sink: Sink, fds: list[int]) -> None:
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
            if self._venv.is_new and self._work.is_private:
                self._venv.ensure()  # a few small files, as nothing has run here yet
            elif not self._venv.is_unchanged():
                # Sandboxed code can make it large, so this must not block the event loop.
                await threads.files.run(self._work.tree, self._venv.ensure)
        except OSError as exc:
            raise self._pool.spawn_failed("the venv could not be made", exc) from exc

    def _on_end(self, run: LocalRun) -> None:
        self._runs.discard(run)
        if not self._runs and self._work.is_private:
            asyncio.get_running_loop().call_later(_FOLLOW_UP_OTHER_S, self._check_venv)

    def _check_venv(self) -> None:
        """Verify the venv between commands, so that the next one need not."""
        pool = self._pool
        is_free = not self._runs and not pool.pythons.has_any and pool.sandboxes.is_open
        self._is_venv_verified = is_free and self._venv.is_unchanged()

    def _follow_up(self, run: LocalRun, posture: Posture, spec: RunSpec) -> None:
        """Read the output of a command that runs on, and prepare a spare for the next one."""
        run.listen()
        if not self._postures.is_current(posture) or not self._pool.sandboxes.is_open:
            return
        if self._pool.fill(posture, spec, venv=self._venv, build=self._build):
            self._is_venv_verified = (
                False  # the new Python executes code of the venv before it waits
            )

    def _build(self, spec: RunSpec, posture: Posture) -> Command:
        return self._commands.build(
            spec, host_env=posture.host_env, count_processes=posture.counts_processes
        )

    def end_all(self) -> None:
        """Kill every command of the session."""
        for run in tuple(self._runs):
            run.end_now("closed")

    def close_postures(self) -> None:
        """Close the postures of the session and of single calls."""
        if "_calls" in self.__dict__:
            self._calls.close()
        self._postures.close()

    async def all_ended(self, *, is_stuck: bool) -> None:
        """Wait for the end of every command, with the channel drained.

        Args:
            is_stuck: do not wait for killed processes, because the channel was not drained in time.

        """
        for run in tuple(self._runs):
            run.end_now(
                "closed"
            )  # again, because the launcher may have died before it read the first request
            if is_stuck:
                run.give_up_killed()
            await until_done(run.finished)
            run.abandon()
