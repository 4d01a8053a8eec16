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
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from union.sandbox._core.files import FileInfo, Transfer
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transport import Transport
    from union.sandbox._session.trees import Progress
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
        self._is_ending = False
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
            self._transport = transport
            self._learn()
        except BaseException:
            self._state = "closed"
            self._why_closed = "the session could not be opened"
            self._transport = None
            if transport is not None:
                await transport.aclose()
            raise
        self._state = "open"
        if self._spec.timeout_s is not None:
            self._deadline = self._loop.call_later(self._spec.timeout_s, self._expire)
        return self

    def _expire(self) -> None:
        self._why_closed = f"the session's timeout_s={self._spec.timeout_s:g} has passed"
        self._state = "closed"
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
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            if not self._is_ending and self._closing.cancelling():
                # The loop ends, and has cancelled that task before its first step: it never begins.
                await self._close()
            raise

    async def _close(self) -> None:
        self._is_ending = True
        self._state = "closed"
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._learn()
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
        self._learn()
        return self._spec.backend if self._facts is None else self._facts.isolation.backend

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
        if self._transport is None:
            raise SessionClosedError(
                "the session was not opened", hint="use `async with` or `await session.open()`"
            )
        self._learn()
        if self._facts is None:
            raise SandboxUsageError(
                "the server was not reached yet",
                code="not-connected",
                hint="it is at the first call, or with lazy=False when the session is opened",
            )
        return self._facts

    def _learn(self) -> None:
        """Takes down what is true of the transport, as soon as it knows."""
        transport = self._transport
        if self._facts is None and transport is not None and transport.is_known:
            self._facts = _Facts(transport.work_dir, transport.isolation)

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
        pty: bool | tuple[int, int] = False,
        max_output_bytes: int | None = None,
    ) -> SandboxProcess:
        """Runs one command in its own isolated process tree.

        With a piped stream, or ``background=True``, returns as soon as the command has started;
        otherwise when it has ended, its output collected in the returned handle. A non-zero exit
        is data, never an exception.

        ``pty=True``, or ``pty=(rows, columns)``, gives the command a terminal of its own: its
        output, stderr included, is ``stdout``, and what is written to ``stdin`` is typed. Closing
        ``stdin`` types the end-of-file character; without any ``stdin`` that is all that is typed.
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
            pty=pty,
            max_output_bytes=max_output_bytes,
        )
        return await self._start(transport, spec)

    async def _start(self, transport: Transport, spec: RunSpec) -> SandboxProcess:
        process = SandboxProcess(spec, self._processes.discard)
        self._processes.add(process)
        try:
            process._attach(await transport.start(spec, process))  # noqa: SLF001 - one handle
        except BaseException:
            self._processes.discard(process)
            raise
        live = spec.background or "pipe" in {spec.stdout, spec.stderr, spec.stdin}
        if not live:
            try:
                await process._until_done()  # noqa: SLF001 - one handle
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
        transport = self._live()
        overwrite = _flag(overwrite, "overwrite")
        return await transport.put(path, data, mode=mode, overwrite=overwrite)

    async def get_bytes(self, path: str, *, max_bytes: int = 0) -> bytes:
        """Reads a file under the work dir; larger than ``max_bytes`` is an error, not a cut."""
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise SandboxUsageError(
                f"max_bytes must be a whole number of bytes, or 0 for the session's limit, "
                f"not {max_bytes!r}",
                argument="max_bytes",
            )
        return await self._live().get(path, max_bytes=max_bytes or constants.MAX_FILE_BYTES)

    async def list_dir(self, path: str = ".") -> tuple[FileInfo, ...]:
        """What is in a directory of the work dir, sorted; links are described, not followed."""
        return await self._live().list_dir(path)

    async def stat(self, path: str) -> FileInfo:
        """What has this name in the work dir; a link is described, not followed."""
        return await self._live().stat(path)

    async def exists(self, path: str) -> bool:
        """Whether anything has this name in the work dir, a dangling link included."""
        try:
            await self._live().stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Makes a directory under the work dir; as it is wanted, it may be there already."""
        transport = self._live()
        parents, exist_ok = _flag(parents, "parents"), _flag(exist_ok, "exist_ok")
        await transport.make_dir(path, parents=parents, exist_ok=exist_ok)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file, a link or a directory; one that is not empty needs ``recursive``."""
        transport = self._live()
        await transport.remove(path, recursive=_flag(recursive, "recursive"))

    async def upload(
        self,
        local: str | os.PathLike[str],
        path: str,
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copies a file of the caller's to ``path``, or what is in a directory into ``path``.

        Links and special files of a tree are not copied; the result names them. ``max_bytes`` and
        ``max_files`` (0: the session's limits) bound the whole, and more is an error before the
        first byte. ``progress`` is called with the bytes so far, the bytes in all (None while they
        are counted) and the path below the top.
        """
        from union.sandbox._session import trees

        options = trees.checked_options(
            self._live,
            overwrite=overwrite,
            max_bytes=max_bytes,
            max_files=max_files,
            progress=progress,
        )
        return await trees.upload(local, path, options)

    async def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copies a file to ``local``, or what is in a directory into the directory ``local``.

        Takes the arguments of ``upload()``. Nothing is written outside ``local``, no link in it is
        followed, and no set-id bit arrives. A file that changes into something else meanwhile is
        not copied; the result names it.
        """
        from union.sandbox._session import trees

        options = trees.checked_options(
            self._live,
            overwrite=overwrite,
            max_bytes=max_bytes,
            max_files=max_files,
            progress=progress,
        )
        return await trees.download(path, local, options)

    def __repr__(self) -> str:
        return f"<Session {self._state} backend={self.backend}>"


def _flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise SandboxUsageError(
            f"{argument} must be True or False, not {value!r}", argument=argument
        )
    return value
