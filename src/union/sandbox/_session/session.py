"""Session: the one API over every transport."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self, cast

from union.sandbox import constants
from union.sandbox._core.resolve import resolve_run
from union.sandbox._session.process import ExecResult, SandboxProcess
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

    from union.sandbox._core.files import FileInfo, Transfer
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import BackendName, NetworkMode, ScriptType
    from union.sandbox._core.resources import AnyResources
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transfer import Progress
    from union.sandbox._session.transport import Transport
    from union.sandbox.constants import Stream

    Paths = Sequence[str | os.PathLike[str]]

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
        self._is_entered = False
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
        self._loop = _running_loop()
        self._state = "opening"
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
        if _running_loop() is not self._loop:
            raise self._other_loop()
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

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the session, as ``open()`` does; on an open one, return it."""
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._state != "open":
            return await self.open()
        self._live()  # it must belong to this event loop
        return self

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise SessionClosedError(
                "the session is open already, in another `async with` block",
                hint="make a new one with session(...)",
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
            raise SessionClosedError(self._why_closed)
        if _running_loop() is not self._loop:
            raise self._other_loop()
        return self._transport

    def _other_loop(self) -> SandboxUsageError:
        from union.sandbox._session.event_loops import other_loop

        return other_loop(self._loop)

    # Facts.

    @property
    def backend(self) -> BackendName:
        """The isolation backend that was asked for, and is used."""
        self._learn()
        found = self._spec.backend if self._facts is None else self._facts.isolation.backend
        return cast("BackendName", found)

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
        """Runs one command in its own isolated process tree.

        With a piped stream, or ``background=True``, returns as soon as the command has started;
        otherwise when it has ended, its output collected in the returned handle. A non-zero exit
        is data, never an exception.

        ``pty=True``, or ``pty=(rows, columns)``, gives the command a terminal of its own: its
        output, stderr included, is ``stdout``, and what is written to ``stdin`` is typed. Closing
        ``stdin`` types the end-of-file character; without any ``stdin`` that is all that is typed.

        ``resources`` lowers limits of the session for this call. ``read_only_paths`` and
        ``read_write_paths`` show further paths to this call alone, under the rules of the
        session's; a path that the session shows writable can be made read-only. Raises
        ``PolicyError`` for a higher limit, and for writing to a path that the session names
        read-only.
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
        """Runs one command to its end and returns its exit code and decoded output.

        With ``check=True`` a non-zero exit raises ``SandboxCommandError``. Cancelling this kills
        the command. The other arguments are those of ``run()``.
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
        """Runs Python source, returns its stdout; non-zero raises ``SandboxCommandError``.

        Takes the arguments of ``exec()``, but for ``check`` and ``script_type``.
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
        from union.sandbox._session import transfer as trees

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
        from union.sandbox._session import transfer as trees

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


def _running_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, or raise an error that names what runs instead."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from union.sandbox._session.event_loops import no_loop

        raise no_loop() from None


def _unknown(call: Callable[..., Any], unknown: Mapping[str, object]) -> UnknownArgumentError:
    from union.sandbox._core.suggestions import unknown_argument

    return unknown_argument(call, unknown)


def _flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise SandboxUsageError(
            f"{argument} must be True or False, not {value!r}", argument=argument
        )
    return value
