"""Session: the API that is the same over every transport."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Never, Self, cast

from union.sandbox._core.resolve import resolve_run
from union.sandbox._session import registry
from union.sandbox._session.machine_files import MachineFiles
from union.sandbox._session.own_loop import carry, foreign_loop, in_own_loop
from union.sandbox._session.process import SandboxProcess
from union.sandbox._session.session_checkpoints import SessionCheckpoints
from union.sandbox._session.session_processes import SessionProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from types import TracebackType

    from union.sandbox._contexts.context import Context
    from union.sandbox._contexts.specs import ContextLanguage, ContextRestart
    from union.sandbox._core.literals import BackendName, NetworkMode, ScriptType
    from union.sandbox._core.resources import AnyResources
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._session.lifecycle import Lifecycle
    from union.sandbox._session.result import ExecResult
    from union.sandbox._session.transport import Transport
    from union.sandbox.constants import Stream
    from union.sandbox.errors import UnknownArgumentError

    Paths = Sequence[str | os.PathLike[str]]

__all__ = ["Session"]


class Session(MachineFiles, SessionProcesses, SessionCheckpoints):
    """A live sandbox: a work dir and a venv that persist over many isolated commands.

    ``on_device.session()`` and ``remote.session()`` return one. ``async with``, ``await session``
    or ``await session.open()`` opens it. It ends with the event loop that opened it; calls from
    other event loops and threads are carried to that loop.
    """

    def __init__(
        self, spec: SessionSpec, lifecycle: Lifecycle, session_id: str | None = None
    ) -> None:
        super().__init__(lifecycle)
        self._id = os.urandom(16).hex() if session_id is None else session_id
        self._spec = spec
        self._lifecycle = lifecycle
        self._processes = lifecycle.processes
        if session_id is None:  # the others are on a server, which finds them
            registry.add(self)

    # Opening and closing.

    async def open(self) -> Self:
        """Open the session and return it.

        Raises:
            BackendUnavailableError: this machine cannot provide the isolation requested.
            SessionClosedError: the session is open already, or was closed.

        """
        await self._lifecycle.open()
        return self

    @in_own_loop
    async def close(self) -> None:
        """End every command, remove the private work dir, and return when that is done.

        A work dir given as ``host_work_dir`` is kept. Closing twice is allowed.
        """
        await self._lifecycle.close()

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the session like ``open()``; return it if it is open already."""
        return self._opened().__await__()

    @in_own_loop
    async def _opened(self) -> Self:
        await self._lifecycle.ensure_open()
        return self

    @in_own_loop
    async def __aenter__(self) -> Self:
        await self._lifecycle.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # Information.

    @property
    def id(self) -> str:
        """The id of the session, for ``on_device.attach()`` or ``remote.attach()``."""
        return self._id

    @property
    def backend(self) -> BackendName:
        """The isolation backend in use, which is the one requested."""
        info = self._lifecycle.info
        return cast("BackendName", self._spec.backend if info is None else info.isolation.backend)

    @property
    def work_dir(self) -> str:
        """The path, inside the sandbox, of the directory that persists between calls."""
        return self._lifecycle.work_dir

    @property
    def _transport(self) -> Transport | None:
        return self._lifecycle.transport

    # Running.

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        stdout: bool | Stream | None = None,
        stderr: bool | Stream | None = None,
        stdin: bytes | bool | Stream | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        script_type: ScriptType = "shell",
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        background: bool = False,
        pty: bool | tuple[int, int] = False,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = (),
        read_write_paths: Paths = (),
        **unknown: Never,
    ) -> SandboxProcess:
        """Run one command in its own isolated process tree.

        Returns when the command has started if a stream is piped or ``background`` is true;
        otherwise when it has ended, with its output collected. A non-zero exit never raises.

        Args:
            cmd: shell text; Python source if ``script_type="python"``; or a list of strings,
                executed without a shell.
            stdout: None (default) collects, True or ``PIPE`` streams, ``INHERIT`` copies to the
                caller's stdout, False or ``DEVNULL`` discards.
            stderr: as ``stdout``, or ``STDOUT`` to write to the same stream as stdout, in order.
                Must be None with ``pty``.
            stdin: bytes to send, or True or ``PIPE`` for ``process.stdin``. None (default), False
                and ``DEVNULL`` give end-of-file.
            env: variables added to those of the session; None (default) adds none.
            cwd: start directory: relative to the work dir, or absolute inside. None (default) for
                the work dir.
            script_type: ``"shell"`` (default) or ``"python"``.
            network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``, within what the session
                allows. None (default) for the mode of the session.
            network_allowlist: hosts, addresses or ranges for mode ``"allowlist"``, each with an
                optional ``:port``, and ``Http`` entries. None (default): the session's list.
            timeout_s: seconds until the command is ended; None (default) for no limit.
            background: whether to return as soon as the command has started; False by default.
            pty: True for a terminal of 24 rows and 80 columns, ``(rows, columns)`` for another
                size, False (default) for none. Its output, stderr included, is ``stdout``. Bytes
                written to ``stdin`` are typed; closing ``stdin`` types the end-of-file character.
            max_output_bytes: bytes to collect of each stream; None (default) for 64 MiB.
                ``process.truncated`` names the streams that were cut.
            resources: limits for this call, none higher than the session's. None (default) for
                the limits of the session.
            read_only_paths: further absolute paths to show read-only; none by default. A path that
                the session shows writable becomes read-only for this call.
            read_write_paths: further absolute paths to show writable; none by default.
            **unknown: not accepted; another keyword raises ``UnknownArgumentError``.

        Raises:
            SandboxUsageError: an argument is invalid, or the session is not open.
            PolicyError: the call exceeds what its session allows: a higher limit, a wider network,
                or writing to a path that the session shows read-only.
            SandboxExecutionError: no real exit happened (only if this call waits for the end).

        """
        if unknown:
            raise _unknown(self.run, unknown)
        loop = None
        transport = self._lifecycle.live_here()
        if transport is None:
            loop = foreign_loop(self)
            transport = self._live() if loop is None else None
        spec = resolve_run(
            self._spec,
            cmd,
            stdout=stdout,
            stderr=stderr,
            stdin=stdin,
            env=env,
            cwd=cwd,
            script_type=script_type,
            network_mode=network_mode,
            network_allowlist=network_allowlist,
            timeout_s=timeout_s,
            background=background,
            pty=pty,
            max_output_bytes=max_output_bytes,
            resources=resources,
            read_only_paths=read_only_paths,
            read_write_paths=read_write_paths,
        )
        if loop is not None:
            return await carry(loop, lambda: self._start(None, spec))  # looks it up there
        return await self._start(transport, spec)

    async def _start(self, transport: Transport | None, spec: RunSpec) -> SandboxProcess:
        process = SandboxProcess(spec, self._processes.discard)
        self._processes.add(process)
        try:
            started = (transport or self._live()).start(spec, process._sink)  # noqa: SLF001
            process._attach(await started)  # noqa: SLF001 - one handle
        except BaseException:
            self._processes.discard(process)
            raise
        if not (spec.background or "pipe" in {spec.stdout, spec.stderr, spec.stdin}):
            try:
                await process._until_done()  # noqa: SLF001 - one handle
            except asyncio.CancelledError:
                process.kill()
                raise
        return process

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        check: bool = False,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        script_type: ScriptType = "shell",
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = (),
        read_write_paths: Paths = (),
        **unknown: Never,
    ) -> ExecResult:
        """Run one command to its end and return its exit code and decoded output.

        Cancelling this call kills the command.

        Args:
            cmd: as for ``run()``.
            check: whether a non-zero exit raises ``SandboxCommandError``; False by default.
            stdin: bytes to send; None (default) for end-of-file.
            env: variables added to those of the session; None (default) adds none.
            cwd: start directory; None (default) for the work dir.
            script_type: ``"shell"`` (default) or ``"python"``.
            network_mode: as for ``run()``; None (default) for the mode of the session.
            network_allowlist: as for ``run()``; None (default) for the list of the session.
            timeout_s: seconds until the command is ended; None (default) for no limit.
            max_output_bytes: bytes to collect of each stream; None (default) for 64 MiB.
            resources: limits for this call; None (default) for those of the session.
            read_only_paths: further paths to show read-only; none by default.
            read_write_paths: further paths to show writable; none by default.
            **unknown: not accepted; another keyword raises ``UnknownArgumentError``.

        Raises:
            SandboxCommandError: the exit code is not 0 and ``check`` is true.
            SandboxExecutionError: no real exit happened.

        """
        if unknown:
            raise _unknown(self.exec, unknown)
        process = await self.run(
            cmd,
            stdin=stdin,
            env=env,
            cwd=cwd,
            script_type=script_type,
            network_mode=network_mode,
            network_allowlist=network_allowlist,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            resources=resources,
            read_only_paths=read_only_paths,
            read_write_paths=read_write_paths,
        )
        result = process.result()
        if check and not result.ok:
            raise process._command_error(cmd, result)  # noqa: SLF001 - one handle
        return result

    async def run_code(
        self,
        code: str,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = (),
        read_write_paths: Paths = (),
        **unknown: Never,
    ) -> str:
        """Run Python source and return its stdout. Cancelling this call kills the command.

        Args:
            code: Python source; indentation shared by all lines is removed.
            stdin: bytes to send; None (default) for end-of-file.
            env: variables added to those of the session; None (default) adds none.
            cwd: start directory; None (default) for the work dir.
            network_mode: as for ``run()``; None (default) for the mode of the session.
            network_allowlist: as for ``run()``; None (default) for the list of the session.
            timeout_s: seconds until the code is ended; None (default) for no limit.
            max_output_bytes: bytes to collect of each stream; None (default) for 64 MiB.
            resources: limits for this call; None (default) for those of the session.
            read_only_paths: further paths to show read-only; none by default.
            read_write_paths: further paths to show writable; none by default.
            **unknown: not accepted; another keyword raises ``UnknownArgumentError``.

        Raises:
            SandboxCommandError: the exit code is not 0; the error holds the result.
            SandboxExecutionError: no real exit happened.

        """
        if unknown:
            raise _unknown(self.run_code, unknown)
        result = await self.exec(
            code,
            check=True,
            script_type="python",
            stdin=stdin,
            env=env,
            cwd=cwd,
            network_mode=network_mode,
            network_allowlist=network_allowlist,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            resources=resources,
            read_only_paths=read_only_paths,
            read_write_paths=read_write_paths,
        )
        return result.stdout

    def context(
        self,
        language: ContextLanguage = "python",
        *,
        env: Mapping[str, str] | None = None,
        restart: ContextRestart = "never",
        interrupt_grace_s: float = 2.0,
    ) -> Context:
        """Return a context: an interpreter that keeps its variables from cell to cell.

        ``async with`` starts it. It is one sandbox with the limits of the session.

        Args:
            language: ``"python"`` (default), ``"bash"`` or ``"node"``.
            env: variables added to those of the session; None (default) adds none.
            restart: ``"auto"`` starts a new interpreter for the next cell after one has ended;
                ``"never"`` (default) raises ``ContextLostError`` then.
            interrupt_grace_s: seconds after which an interpreter that ignores an interrupt is
                killed; 2 by default.

        Raises:
            SandboxUsageError: an argument is invalid.

        """
        from union.sandbox._contexts.context import Context, opener_of

        made = Context(
            self._spec,
            lambda: opener_of(self._live()),
            language=language,
            env=env,
            restart=restart,
            interrupt_grace_s=interrupt_grace_s,
        )
        return self._tracked(made)

    def __repr__(self) -> str:
        return f"<Session {self._lifecycle.state} backend={self.backend}>"


def _unknown(call: Callable[..., Any], unknown: Mapping[str, object]) -> UnknownArgumentError:
    from union.sandbox._core.suggestions import unknown_argument

    return unknown_argument(call, unknown)
