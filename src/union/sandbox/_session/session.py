"""Session: the API that is the same over every transport."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self, cast

from union.sandbox._core.resolve import resolve_run
from union.sandbox._session.process import ExecResult, SandboxProcess
from union.sandbox._session.session_files import SessionFiles
from union.sandbox.errors import (
    SandboxCommandError,
    SandboxUsageError,
    SessionClosedError,
    UnknownArgumentError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Mapping, Sequence
    from types import TracebackType

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import BackendName, NetworkMode, ScriptType
    from union.sandbox._core.resources import AnyResources
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transport import Transport
    from union.sandbox.constants import Stream

    Paths = Sequence[str | os.PathLike[str]]

__all__ = ["Session"]


class _SessionInfo(NamedTuple):
    work_dir: str
    isolation: Isolation


class Session(SessionFiles):
    """A live sandbox: a work dir and a venv that persist over many isolated commands.

    ``on_device.session()`` and ``remote.session()`` return one. ``async with``, ``await session``
    or ``await session.open()`` opens it. A session belongs to the event loop that opened it.
    """

    def __init__(self, spec: SessionSpec, transport: Callable[[], Transport]) -> None:
        self._spec = spec
        self._make_transport = transport
        self._transport: Transport | None = None
        self._info: _SessionInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._closed_reason = "the session is closed"
        self._closing: asyncio.Task[None] | None = None
        self._close_started = False
        self._is_entered = False
        self._deadline: asyncio.TimerHandle | None = None
        self._processes: set[SandboxProcess] = set()

    # Opening and closing.

    async def open(self) -> Self:
        """Open the session and return it.

        Raises:
            BackendUnavailableError: this machine cannot provide the isolation requested.
            SessionClosedError: the session is open already, or was closed.

        """
        if self._state != "new":
            state = "open already" if self._state in {"open", "opening"} else "closed"
            raise SessionClosedError(
                f"the session is {state}", hint="create a new one with session(...)"
            )
        self._loop = _running_loop()
        self._state = "opening"
        transport: Transport | None = None
        try:
            transport = self._make_transport()
            await transport.open()
            self._transport = transport
            self._update_info()
        except BaseException:
            self._state = "closed"
            self._closed_reason = "the session could not be opened"
            self._transport = None
            if transport is not None:
                await transport.aclose()
            raise
        self._state = "open"
        if self._spec.timeout_s is not None:
            self._deadline = self._loop.call_later(self._spec.timeout_s, self._expire)
        return self

    def _expire(self) -> None:
        self._closed_reason = f"the session's timeout_s={self._spec.timeout_s:g} has passed"
        self._state = "closed"
        for process in tuple(self._processes):
            process._expire()  # noqa: SLF001 - the session owns its processes
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def close(self) -> None:
        """End every command, remove the private work dir, and return when that is done.

        A work dir given as ``host_work_dir`` is kept. Closing twice is allowed.
        """
        if self._state == "new":
            self._state = "closed"
            return
        if _running_loop() is not self._loop:
            raise self._other_loop()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Cancelling a caller of close() must not leave a session half closed.
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            if not self._close_started and self._closing.cancelling():
                # The event loop is ending and cancelled that task before its first step, so the
                # task never runs.
                await self._close()
            raise

    async def _close(self) -> None:
        self._close_started = True
        self._state = "closed"
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._update_info()
            await self._transport.aclose()

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the session like ``open()``; return it if it is open already."""
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._state != "open":
            return await self.open()
        self._live()  # raises if the session belongs to another event loop
        return self

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise SessionClosedError(
                "the session is open already, in another `async with` block",
                hint="create a new one with session(...)",
            )
        session = await self._opened()
        self._is_entered = True
        return session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _live(self) -> Transport:
        if self._state in {"new", "opening"}:
            raise SessionClosedError(
                "the session is not open", hint="use `async with session` or `await session.open()`"
            )
        if self._state == "closed" or self._transport is None:
            raise SessionClosedError(self._closed_reason)
        if _running_loop() is not self._loop:
            raise self._other_loop()
        return self._transport

    def _other_loop(self) -> SandboxUsageError:
        from union.sandbox._session.event_loops import other_loop

        return other_loop(self._loop)

    # Information.

    @property
    def backend(self) -> BackendName:
        """The isolation backend in use, which is the one requested."""
        self._update_info()
        found = self._spec.backend if self._info is None else self._info.isolation.backend
        return cast("BackendName", found)

    @property
    def work_dir(self) -> str:
        """The path, inside the sandbox, of the directory that persists between calls."""
        return self._required_info().work_dir

    @property
    def isolation(self) -> Isolation:
        """The isolation layers, verified on a live sandbox when the session was opened."""
        return self._required_info().isolation

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        """Return the paths visible inside, by ``"read_only"`` and ``"read_write"``."""
        return self._live().fs_allowlist()

    def _required_info(self) -> _SessionInfo:
        """Return what was true when the session was opened; available also after its end."""
        if self._transport is None:
            raise SessionClosedError(
                "the session was not opened", hint="use `async with` or `await session.open()`"
            )
        self._update_info()
        if self._info is None:
            raise SandboxUsageError(
                "the session has not connected to its server yet",
                code="not-connected",
                hint="make a call first, or open with lazy=False",
            )
        return self._info

    def _update_info(self) -> None:
        """Store the work dir and the isolation as soon as the transport has them."""
        transport = self._transport
        if self._info is None and transport is not None and transport.is_known:
            self._info = _SessionInfo(transport.work_dir, transport.isolation)

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
        network_allowlist: Sequence[str] | None = None,
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
            stderr: as ``stdout``. Must be None with ``pty``.
            stdin: bytes to send, or True or ``PIPE`` for ``process.stdin``. None (default), False
                and ``DEVNULL`` give end-of-file.
            env: variables added to those of the session; None (default) adds none.
            cwd: start directory: relative to the work dir, or absolute inside. None (default) for
                the work dir.
            script_type: ``"shell"`` (default) or ``"python"``.
            network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``, within what the session
                allows. None (default) for the mode of the session.
            network_allowlist: hosts, addresses or ranges for mode ``"allowlist"``, each with an
                optional ``:port``. None (default) for the list of the session.
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
        transport = self._live()
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
        return await self._start(transport, spec)

    async def _start(self, transport: Transport, spec: RunSpec) -> SandboxProcess:
        process = SandboxProcess(spec, self._processes.discard)
        self._processes.add(process)
        try:
            process._attach(await transport.start(spec, process._sink))  # noqa: SLF001 - one handle
        except BaseException:
            self._processes.discard(process)
            raise
        live = spec.background or "pipe" in {spec.stdout, spec.stderr, spec.stdin}
        if not live:
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
        network_allowlist: Sequence[str] | None = None,
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
            raise SandboxCommandError(cmd, result)
        return result

    async def run_code(
        self,
        code: str,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = (),
        read_write_paths: Paths = (),
        **unknown: Never,
    ) -> str:
        """Run Python source and return its stdout.

        Cancelling this call kills the command.

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

    def __repr__(self) -> str:
        return f"<Session {self._state} backend={self.backend}>"


def _running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise an error that names what runs instead."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from union.sandbox._session.event_loops import no_loop

        raise no_loop() from None


def _unknown(call: Callable[..., Any], unknown: Mapping[str, object]) -> UnknownArgumentError:
    from union.sandbox._core.suggestions import unknown_argument

    return unknown_argument(call, unknown)
