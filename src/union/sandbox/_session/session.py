"""Session: the one API over every transport."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from union.sandbox import constants
from union.sandbox._core.resolve import resolve_run
from union.sandbox._session.process import ExecResult, SandboxProcess
from union.sandbox.errors import (
    SandboxCommandError,
    SandboxUsageError,
    SessionClosedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transport import Transport
    from union.sandbox.constants import Stream

__all__ = ["Session"]


class _Facts(NamedTuple):
    work_dir: str
    isolation: Isolation


class Session:
    """A live sandbox: a work dir and a venv that persist over many isolated commands.

    Made by ``on_device.session()`` or ``remote.session()``; opened by ``async with`` or
    ``await ....open()``.
    """

    def __init__(self, spec: SessionSpec, transport: Callable[[], Transport]) -> None:
        self._spec = spec
        self._make_transport = transport
        self._transport: Transport | None = None
        self._facts: _Facts | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._why_closed = "the session is closed"
        self._closing: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._processes: set[SandboxProcess] = set()

    # Opening and closing.

    async def open(self) -> Self:
        """Opens the session; ``BackendUnavailableError`` if its isolation is not to be had."""
        if self._state != "new":
            state = "open already" if self._state in {"open", "opening"} else "closed"
            raise SessionClosedError(
                f"the session is {state}", hint="make a new one with session(...)"
            )
        self._state = "opening"
        self._loop = asyncio.get_running_loop()
        transport: Transport | None = None
        try:
            transport = self._make_transport()
            await transport.open()
        except BaseException:
            self._state = "closed"
            self._why_closed = "the session could not be opened"
            if transport is not None:
                await transport.aclose()
            raise
        self._transport = transport
        self._facts = _Facts(transport.work_dir, transport.isolation)
        self._state = "open"
        if self._spec.timeout_s is not None:
            self._deadline = self._loop.call_later(self._spec.timeout_s, self._expire)
        return self

    def _expire(self) -> None:
        self._why_closed = f"the session's timeout_s={self._spec.timeout_s:g} has passed"
        for process in tuple(self._processes):
            process._expire()  # noqa: SLF001 - the session owns its processes
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def close(self) -> None:
        """Ends everything the session started, removes what it made; returns when that is done."""
        if self._state == "new":
            self._state = "closed"
            return
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Cancelling a caller of close() must not leave half a session behind.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state = "closed"
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

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
            raise SessionClosedError(self._why_closed)
        if asyncio.get_running_loop() is not self._loop:
            raise SandboxUsageError(
                "the session belongs to another event loop", hint="open one session per event loop"
            )
        return self._transport

    # Facts.

    @property
    def backend(self) -> str:
        """The isolation backend that was asked for, and is used."""
        return self._spec.backend

    @property
    def work_dir(self) -> str:
        """The directory that persists between calls, by its path inside."""
        return self._known().work_dir

    @property
    def isolation(self) -> Isolation:
        """What is enforced, as verified when the session was opened."""
        return self._known().isolation

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        """The paths visible inside: ``read_only`` and ``read_write``."""
        return self._live().fs_allowlist()

    def _known(self) -> _Facts:
        """What was true when the session was opened; still to be asked for after its end."""
        if self._facts is None:
            raise SessionClosedError(
                "the session was not opened", hint="use `async with` or `await session.open()`"
            )
        return self._facts

    # Running.

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        stdout: bool | Stream | None = None,
        stderr: bool | Stream | None = None,
        stdin: bytes | bool | Stream | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        script_type: str = "shell",
        network_mode: str | None = None,
        network_allowlist: Sequence[str] | None = None,
        timeout_s: float | None = None,
        background: bool = False,
        max_output_bytes: int | None = None,
    ) -> SandboxProcess:
        """Runs one command in its own isolated process tree.

        With a piped stream, or ``background=True``, returns as soon as the command has started;
        otherwise when it has ended, its output collected in the returned handle. A non-zero exit
        is data, never an exception.
        """
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
            max_output_bytes=max_output_bytes,
        )
        return await self._start(transport, spec)

    async def _start(self, transport: Transport, spec: RunSpec) -> SandboxProcess:
        process = SandboxProcess(spec, backend=self._spec.backend, isolation=transport.isolation)
        self._processes.add(process)
        process._done.add_done_callback(lambda _: self._processes.discard(process))  # noqa: SLF001
        try:
            process._attach(await transport.start(spec, process))  # noqa: SLF001 - one handle
        except BaseException:
            self._processes.discard(process)
            raise
        live = spec.background or "pipe" in {spec.stdout, spec.stderr, spec.stdin}
        if not live:
            try:
                await asyncio.shield(process._done)  # noqa: SLF001 - one handle
                await process._finish_pumps()  # noqa: SLF001
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
        cwd: str | None = None,
        script_type: str = "shell",
        network_mode: str | None = None,
        network_allowlist: Sequence[str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Runs one command to its end and returns its exit code and decoded output.

        With ``check=True`` a non-zero exit raises ``SandboxCommandError``. Cancelling this kills
        the command.
        """
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
        )
        result = process.result()
        if check and not result.ok:
            raise SandboxCommandError(cmd, result)
        return result

    async def run_code(self, code: str, **options: Any) -> str:
        """Runs Python source, returns its stdout; non-zero raises ``SandboxCommandError``.

        Takes the ``env``, ``cwd``, ``stdin``, network, ``timeout_s`` and ``max_output_bytes``
        arguments of ``exec()``.
        """
        result = await self.exec(code, check=True, script_type="python", **options)
        return result.stdout

    # Files.

    async def put_bytes(
        self, path: str, data: bytes, *, mode: int = 0o644, overwrite: bool = True
    ) -> int:
        """Writes a file under the work dir, creating its parents; returns the number of bytes."""
        if not isinstance(overwrite, bool):
            raise SandboxUsageError(
                f"overwrite must be True or False, not {overwrite!r}", argument="overwrite"
            )
        return await self._live().put(path, data, mode=mode, overwrite=overwrite)

    async def get_bytes(self, path: str, *, max_bytes: int = 0) -> bytes:
        """Reads a file under the work dir; larger than ``max_bytes`` is an error, not a cut."""
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise SandboxUsageError(
                f"max_bytes must be a whole number of bytes, or 0 for the session's limit, "
                f"not {max_bytes!r}",
                argument="max_bytes",
            )
        return await self._live().get(path, max_bytes=max_bytes or constants.MAX_FILE_BYTES)

    def __repr__(self) -> str:
        return f"<Session {self._state} backend={self._spec.backend}>"
