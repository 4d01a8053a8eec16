"""The shape of the E2B SDK over sessions of this package, for code that is being ported.

``Sandbox`` and ``AsyncSandbox`` have the names, arguments and results of ``e2b_code_interpreter``:
``commands.run()``, ``files``, ``run_code()`` with results. No package and no account is needed.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from union.sandbox import sync
from union.sandbox._contexts.values import CellOutput, CellResult, MimeBundle
from union.sandbox.adapters import _files
from union.sandbox.adapters._common import LazySession, carry
from union.sandbox.adapters._e2b_results import (
    CommandExitException,
    CommandResult,
    EntryInfo,
    Execution,
    ExecutionError,
    Logs,
    Result,
    TimeoutException,
    result_of,
)
from union.sandbox.constants import PIPE
from union.sandbox.errors import SandboxUsageError, SessionClosedError
from union.sandbox.sync import _portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from union.sandbox._contexts.context import Context
    from union.sandbox._session.process import SandboxProcess

__all__ = [
    "AsyncSandbox",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "EntryInfo",
    "Execution",
    "ExecutionError",
    "Logs",
    "Result",
    "Sandbox",
    "TimeoutException",
]

DEFAULT_LIFE_S: Final = 300
DEFAULT_COMMAND_S: Final = 60.0
_LANGUAGES: Final = {
    "python": "python",
    "bash": "bash",
    "js": "node",
    "javascript": "node",
    "node": "node",
}


# Commands.


class CommandHandle:
    """A command that runs in the background."""

    def __init__(
        self,
        process: SandboxProcess,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
        timeout_s: float | None,
    ) -> None:
        self._process = process
        self._timeout_s = timeout_s
        self._output: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._reader = asyncio.ensure_future(self._read(on_stdout, on_stderr))

    @property
    def pid(self) -> int | None:
        """The process id inside the sandbox."""
        return self._process.pid

    async def _read(
        self,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
    ) -> None:
        async def read(
            name: str, source: AsyncIterator[bytes], call: Callable[[str], object] | None
        ) -> None:
            async for data in source:
                text = data.decode("utf-8", "replace")
                self._output[name].append(text)
                if call is not None:
                    value = call(text)
                    if asyncio.iscoroutine(value):
                        await value

        await asyncio.gather(
            read("stdout", self._process.iter_stdout(), on_stdout),
            read("stderr", self._process.iter_stderr(), on_stderr),
        )
        await self._process.wait()

    async def wait(self) -> CommandResult:
        """Wait for the end of the command.

        Raises:
            CommandExitException: the exit code is not 0.
            TimeoutException: the command was ended at its timeout.

        """
        try:
            await asyncio.shield(self._reader)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        if self._process.termination_reason == "timeout":
            raise TimeoutException(f"the command was ended after {self._timeout_s:g} s")
        values = {name: "".join(parts) for name, parts in self._output.items()}
        code = self._process.returncode or 0
        if code:
            raise CommandExitException(exit_code=code, error=f"exit status {code}", **values)
        return CommandResult(exit_code=0, **values)

    async def kill(self) -> bool:
        """Kill the command; return whether it was still running."""
        was_running = self._process.returncode is None
        self._process.kill()
        return was_running

    async def send_stdin(self, data: str) -> None:
        """Write text to stdin."""
        if self._process.stdin is not None:
            self._process.stdin.write(data.encode())
            await self._process.stdin.drain()


class _Commands:
    def __init__(self, session: LazySession) -> None:
        self._session = session

    async def run(  # noqa: PLR0917 - the signature of E2B
        self,
        cmd: str,
        background: bool = False,  # noqa: FBT001, FBT002 - the signature of E2B
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        stdin: bool | None = None,  # noqa: FBT001 - the signature of E2B
        timeout: float | None = DEFAULT_COMMAND_S,  # noqa: ASYNC109 - the signature of E2B
    ) -> Any:
        """Run shell text; return a ``CommandResult``, or in the background a ``CommandHandle``.

        Args:
            cmd: shell text.
            background: whether to return at once; False by default.
            envs: further variables; None (default) for none.
            cwd: the start directory; None (default) for the work dir.
            on_stdout: called with each piece of output; None (default) for no calls.
            on_stderr: called with each piece of error output; None (default) for no calls.
            stdin: whether ``send_stdin()`` is used; None (default) for no.
            timeout: seconds; 60 by default, 0 or None for no limit.

        Raises:
            CommandExitException: the exit code is not 0.
            TimeoutException: the command was ended at its timeout.

        """
        live = await self._session.opened()

        async def start() -> CommandHandle:
            process = await live.run(
                cmd,
                stdout=PIPE,
                stderr=PIPE,
                stdin=PIPE if stdin else None,
                env=envs,
                cwd=cwd,
                timeout_s=timeout or None,
                background=True,
            )
            return CommandHandle(process, on_stdout, on_stderr, timeout)

        handle = await start()
        return handle if background else await handle.wait()


# Files.


class _Filesystem:
    def __init__(self, session: LazySession) -> None:
        self._session = session

    async def read(self, path: str, format: Literal["text", "bytes"] = "text") -> Any:  # noqa: A002 - the name of E2B
        """Return the content of a file, as text or as a ``bytearray``."""
        data = await _files.read(await self._session.opened(), path)
        return data.decode("utf-8", "replace") if format == "text" else bytearray(data)

    async def write(self, path: str, data: str | bytes | Any) -> EntryInfo:
        """Write a file; missing directories are created."""
        if hasattr(data, "read"):
            data = data.read()
        content = data.encode() if isinstance(data, str) else bytes(data)
        await _files.write(await self._session.opened(), path, content)
        return await self.get_info(path)

    async def write_files(self, files: list[Mapping[str, Any]]) -> list[EntryInfo]:
        """Write several files, each with ``path`` and ``data``."""
        return [await self.write(file["path"], file["data"]) for file in files]

    async def list(self, path: str, depth: int = 1) -> list[EntryInfo]:
        """Return the entries of a directory, down to ``depth``."""
        found = await _files.listing(await self._session.opened(), path, depth=depth)
        base = await self._base()
        return [_entry(entry, base) for entry in found]

    async def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        return await _files.exists(await self._session.opened(), path)

    async def get_info(self, path: str) -> EntryInfo:
        """Return the description of a file or directory."""
        found = await _files.listing(await self._session.opened(), path, depth=0)
        return _entry(found[0], await self._base())

    async def remove(self, path: str) -> None:
        """Remove a file or a directory with its content."""
        await _files.remove(await self._session.opened(), path, recursive=True)

    async def rename(self, old_path: str, new_path: str) -> EntryInfo:
        """Rename a file or directory."""
        await _files.rename(await self._session.opened(), old_path, new_path)
        return await self.get_info(new_path)

    async def make_dir(self, path: str) -> bool:
        """Create a directory; return False if it exists already."""
        session = await self._session.opened()
        if await _files.exists(session, path):
            return False
        await _files.make_dir(session, path)
        return True

    async def _base(self) -> str:
        return (await self._session.opened()).work_dir


def _entry(entry: _files.Entry, base: str) -> EntryInfo:
    import stat

    kinds: dict[str, Literal["file", "dir"]] = {"f": "file", "d": "dir"}
    bits = (stat.S_IFDIR if entry.kind == "d" else stat.S_IFREG) | entry.mode
    path = entry.path if entry.path.startswith("/") else f"{base}/{entry.path}"
    return EntryInfo(
        name=entry.name,
        type=kinds.get(entry.target_kind),
        path=path,
        size=entry.size,
        mode=entry.mode,
        permissions=stat.filemode(bits)[1:],
        owner=entry.user,
        group=entry.group,
        modified_time=datetime.fromtimestamp(entry.mtime, UTC),
        symlink_target=entry.link or None,
    )


# Sandboxes.


class AsyncSandbox:
    """A sandbox with the interface of ``e2b_code_interpreter.AsyncSandbox``."""

    def __init__(self, session: LazySession, metadata: Mapping[str, str] | None = None) -> None:
        self._session = session
        self._metadata = dict(metadata or {})
        self._deadline: asyncio.TimerHandle | None = None
        self.commands = _Commands(session)
        self.files = _Filesystem(session)

    @classmethod
    async def create(
        cls,
        *,
        timeout: float | None = DEFAULT_LIFE_S,  # noqa: ASYNC109 - the signature of E2B
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_internet_access: bool = False,
        session: object = None,
        **options: Any,
    ) -> AsyncSandbox:
        """Open a sandbox.

        Args:
            timeout: seconds until it is ended; 300 by default, None for no limit.
            metadata: kept with the object; None (default) for none.
            envs: variables of every command; None (default) for none.
            allow_internet_access: whether the network is open. False by default, unlike E2B.
            session: a session to use, which is not closed here; None (default) opens one.
            **options: further arguments of ``on_device.session()`` or ``remote.session()``.

        """
        if session is None:
            if allow_internet_access:
                options.setdefault("network_mode", "open")
            options.setdefault("env", dict(envs) if envs else None)
        made = cls(LazySession(session, options=options), metadata)
        await made._session.opened()
        if timeout is not None and session is None:
            await made.set_timeout(timeout)
        return made

    @classmethod
    async def connect(cls, sandbox_id: str) -> AsyncSandbox:
        """Return an open sandbox of this process by its id."""
        made = cls(LazySession(session_id=sandbox_id))
        await made._session.opened()
        return made

    @property
    def sandbox_id(self) -> str:
        """The id of the sandbox."""
        return self._session.id or ""

    async def is_running(self) -> bool:
        """Return whether the sandbox is open."""
        try:
            session = await self._session.opened()
        except SessionClosedError:
            return False
        return bool(session._lifecycle.state == "open")  # noqa: SLF001 - a part of it

    async def set_timeout(self, timeout: float) -> None:  # noqa: ASYNC109 - the signature of E2B
        """End the sandbox after ``timeout`` seconds from now."""

        async def schedule() -> None:
            loop = asyncio.get_running_loop()
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = loop.call_later(timeout, lambda: loop.create_task(self.kill()))

        await carry(schedule)

    async def kill(self) -> bool:
        """End the sandbox; return whether it was open."""
        was_open = not self._session.is_closed
        await self._session.aclose()
        return was_open

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    # Code.

    async def create_code_context(
        self, cwd: str | None = None, language: str | None = None
    ) -> Context:
        """Start an interpreter of its own, for ``run_code(context=...)``."""
        live = await self._session.opened()

        async def start() -> Context:
            context = await live.context(_language(language), restart="auto").open()
            if cwd is not None and context.language == "python":
                await context.run(f"import os; os.chdir({json.dumps(cwd)})", check=True)
            return context

        return await carry(start)

    async def run_code(  # noqa: PLR0917 - the signature of E2B
        self,
        code: str,
        language: str | None = None,
        context: Context | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        on_result: Callable[[Result], object] | None = None,
        on_error: Callable[[ExecutionError], object] | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature of E2B
    ) -> Execution:
        """Run code in an interpreter that keeps its variables.

        Args:
            code: the source.
            language: ``"python"`` (default), ``"bash"`` or ``"js"``; not with ``context``.
            context: an interpreter of ``create_code_context()``; None (default) for the shared one.
            on_stdout: called with each piece of output; None (default) for no calls.
            on_stderr: called with each piece of error output; None (default) for no calls.
            on_result: called with each displayed value; None (default) for no calls.
            on_error: called with an exception of the code; None (default) for no calls.
            envs: variables set during this cell; None (default) for none.
            timeout: seconds until the code is interrupted; None (default) for no limit.

        Raises:
            TimeoutException: the code was interrupted at its timeout.

        """
        if context is None:
            context = await self._session.context(_language(language))
        source = cast("Context", getattr(context, "_target", context))
        found = Execution()

        async def run() -> CellResult | None:
            end = None
            async for event in source.stream(code, env=envs, timeout_s=timeout):
                if isinstance(event, CellOutput):
                    is_out = event.stream == "stdout"
                    (found.logs.stdout if is_out else found.logs.stderr).append(event.text)
                    _notify(on_stdout if is_out else on_stderr, event.text)
                elif isinstance(event, MimeBundle):
                    found.results.append(result_of(event))
                    _notify(on_result, found.results[-1])
                else:
                    end = event
            return end

        end = await carry(run)
        if end is None or end.ended == "timeout":
            raise TimeoutException(f"the code was interrupted after {timeout} s")
        found.execution_count = end.number
        if end.error is not None:
            found.error = ExecutionError(end.error.name, end.error.value, end.error.traceback)
        elif end.ended:
            found.error = ExecutionError(end.ended, end.reason, "")
        if found.error is not None:
            _notify(on_error, found.error)
        return found


def _notify(call: Callable[[Any], object] | None, value: Any) -> None:
    if call is not None:
        call(value)


def _language(name: str | None) -> Any:
    if (name or "python").lower() not in _LANGUAGES:
        raise SandboxUsageError(
            f"language must be one of {', '.join(_LANGUAGES)}, not {name!r:.80}",
            argument="language",
        )
    return _LANGUAGES[(name or "python").lower()]


class Sandbox:
    """A sandbox with the interface of ``e2b_code_interpreter.Sandbox``: no ``await``."""

    def __init__(self, target: AsyncSandbox) -> None:
        self._target = target
        self.commands: Any = sync.wrap(target.commands)  # type: ignore[call-overload]
        self.files: Any = sync.wrap(target.files)  # type: ignore[call-overload]

    @classmethod
    def create(cls, **options: Any) -> Sandbox:
        """Open a sandbox.

        Args:
            **options: as for ``AsyncSandbox.create()``.

        """
        return cls(_blocking(lambda: AsyncSandbox.create(**options)))

    @classmethod
    def connect(cls, sandbox_id: str) -> Sandbox:
        """Return an open sandbox of this process by its id."""
        return cls(_blocking(lambda: AsyncSandbox.connect(sandbox_id)))

    @property
    def sandbox_id(self) -> str:
        """The id of the sandbox."""
        return self._target.sandbox_id

    def is_running(self) -> bool:
        """Return whether the sandbox is open."""
        return bool(_blocking(self._target.is_running))

    def set_timeout(self, timeout: float) -> None:
        """End the sandbox after ``timeout`` seconds from now."""
        _blocking(lambda: self._target.set_timeout(timeout))

    def kill(self) -> bool:
        """End the sandbox; return whether it was open."""
        return bool(_blocking(self._target.kill))

    def create_code_context(self, cwd: str | None = None, language: str | None = None) -> Any:
        """Start an interpreter of its own, for ``run_code(context=...)``."""
        return _blocking(lambda: self._target.create_code_context(cwd, language))

    def run_code(self, code: str, language: str | None = None, **arguments: Any) -> Execution:
        """Run code in an interpreter that keeps its variables; see ``AsyncSandbox.run_code()``."""
        found: Execution = _blocking(lambda: self._target.run_code(code, language, **arguments))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _blocking(begin: Callable[[], Any]) -> Any:
    return _portal.Portal.current().call(begin, on_interrupt=None)
