"""The tools and resources of the MCP server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import mimetypes
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import unquote

import anyio
from pydantic import BaseModel, Field

from union.sandbox._contexts.values import CellOutput, CellResult, MimeBundle
from union.sandbox.adapters._common import carry
from union.sandbox.adapters.mcp import _sdk
from union.sandbox.adapters.mcp._checkpoints import register_checkpoints
from union.sandbox.adapters.mcp._sandboxes import BoundedText, Sandboxes
from union.sandbox.adapters.mcp._sdk import CallToolResult, Context, ToolError
from union.sandbox.constants import PIPE
from union.sandbox.errors import SandboxError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from union.sandbox._session.process import SandboxProcess

__all__ = ["Registrar", "register"]

MAX_FILE_BYTES: Final = 256 * 1024
"""The largest part of a file that one call returns."""
MAX_RESOURCE_BYTES: Final = 8 * 1024 * 1024
MAX_ENTRIES: Final = 1000
MAX_IMAGES: Final = 8
MAX_IMAGE_BYTES: Final = 4 * 1024 * 1024
MAX_WAIT_S: Final = 60.0
MAX_PROGRESS: Final = 2000
STOP_GRACE_S: Final = 3.0
DEFAULT_TIMEOUT_S: Final = 120.0
INSTALL_TIMEOUT_S: Final = 600.0

Timeout = Annotated[float, Field(gt=0, description="Seconds until it is ended.")]
Cwd = Annotated[str, Field(description="Start directory, relative to the work dir.")]
Path = Annotated[str, Field(description="Path, relative to the work dir.")]
JobId = Annotated[str, Field(description="The id that start_command returned.")]
Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="The sandbox to use, by name.")
]


class CommandResult(BaseModel):
    """The end of a command. A non-zero exit code is a result, not an error of the tool."""

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = Field(description="Whether output was left out.")
    termination_reason: str = Field(
        description="Empty after an exit; else signal, timeout, oom, limit or closed."
    )
    duration_ms: int


class CellError(BaseModel):
    """An exception that ended a cell."""

    name: str
    value: str
    traceback: str


class CodeResult(BaseModel):
    """The end of a cell. An exception is a result, not an error of the tool."""

    stdout: str
    stderr: str
    text: str | None = Field(description="The value of the last expression.")
    error: CellError | None
    ended: str = Field(
        description="Empty after a normal end; else interrupt, timeout, died, oom or closed."
    )
    variables: str = Field(description="kept, or lost if the interpreter has ended.")
    images: int = Field(description="Images that follow as content.")
    truncated: bool = Field(description="Whether output was left out.")


class FileText(BaseModel):
    """A part of a text file."""

    path: str
    text: str
    size: int = Field(description="Size of the whole file in bytes.")
    truncated: bool = Field(description="Whether lines follow that are not shown.")


class Entry(BaseModel):
    """One entry of a directory."""

    path: str
    kind: str = Field(description="file, dir, symlink or other.")
    size: int


class Listing(BaseModel):
    """The entries of a directory."""

    entries: list[Entry]
    truncated: bool = Field(description="Whether entries were left out.")


class Changed(BaseModel):
    """A file that was written."""

    path: str
    bytes_written: int
    replacements: int = 0


class JobState(BaseModel):
    """A command that was started in the background."""

    id: str
    running: bool
    exit_code: int | None
    output: str = Field(description="stdout and stderr since the last call, in order.")
    truncated: bool = Field(description="Whether output was left out.")


class Done(BaseModel):
    """A completed action."""

    message: str


# Helpers.


@contextlib.contextmanager
def _reported() -> Any:
    """Report errors of the package to the model; other exceptions are defects of the server."""
    try:
        yield
    except SandboxError as exc:
        raise ToolError(str(exc)) from exc


async def _send_progress(ctx: Context, queue: asyncio.Queue[str | None]) -> None:
    """Send output to the client as it arrives, as many chunks at once as there are."""
    sent = 0
    while (text := await queue.get()) is not None:
        parts, is_last = [text], False
        while not queue.empty():
            following = queue.get_nowait()
            if following is None:
                is_last = True
                break
            parts.append(following)
        sent += 1
        # The client may have gone; whether that ends the command is decided elsewhere.
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            await ctx.report_progress(sent, None, "".join(parts)[-MAX_PROGRESS:])
        if is_last:
            return


@contextlib.asynccontextmanager
async def _progress(ctx: Context) -> AsyncIterator[Callable[[bytes], None]]:
    """Return a function that sends output as progress; it may be called in any thread."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    sender = asyncio.create_task(_send_progress(ctx, queue))

    def report(data: bytes) -> None:
        text = data[-MAX_PROGRESS:].decode("utf-8", "replace")
        loop.call_soon_threadsafe(queue.put_nowait, text)

    try:
        yield report
    finally:
        loop.call_soon_threadsafe(queue.put_nowait, None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sender, 5)


async def _finished(process: SandboxProcess, report: Callable[[bytes], None]) -> CommandResult:
    """Read both streams to their end; cancelling kills the command."""
    stdout, stderr = BoundedText(), BoundedText()

    async def read(source: AsyncIterator[bytes], kept: BoundedText) -> None:
        async for chunk in source:
            kept.add(chunk)
            report(chunk)

    try:
        await asyncio.gather(
            read(process.iter_stdout(), stdout), read(process.iter_stderr(), stderr)
        )
        exit_code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        raise
    return CommandResult(
        exit_code=exit_code,
        stdout=stdout.text(),
        stderr=stderr.text(),
        truncated=stdout.is_cut or stderr.is_cut,
        termination_reason=process.termination_reason,
        duration_ms=round(process.runtime_ms),
    )


def _cut(text: str) -> tuple[str, bool]:
    kept = BoundedText()
    kept.add(text.encode("utf-8", "replace"))
    return kept.text(), kept.is_cut


def _images(result: CellResult) -> list[Any]:
    found: list[Any] = []
    for bundle in result.results:
        for mime, data in bundle.data.items():
            if mime in {"image/png", "image/jpeg"} and isinstance(data, bytes):
                if len(data) <= MAX_IMAGE_BYTES and len(found) < MAX_IMAGES:
                    found.append(_sdk.image(base64.b64encode(data).decode(), mime))
                break
    return found


def _code_result(result: CellResult) -> Any:
    stdout, out_cut = _cut(result.stdout)
    stderr, err_cut = _cut(result.stderr)
    text, text_cut = (None, False) if result.text is None else _cut(result.text)
    error = None
    if result.error is not None:
        error = CellError(
            name=result.error.name,
            value=_cut(result.error.value)[0],
            traceback=_cut(result.error.traceback)[0],
        )
    images = _images(result)
    value = CodeResult(
        stdout=stdout,
        stderr=stderr,
        text=text,
        error=error,
        ended=result.ended,
        variables=result.state,
        images=len(images),
        truncated=out_cut or err_cut or text_cut or bool(result.truncated),
    )
    copy = _sdk.TextContent(type="text", text=value.model_dump_json(indent=2))
    return _sdk.result([copy, *images], value.model_dump())


def _edited(text: str, old: str, new: str, path: str, *, replace_all: bool) -> tuple[str, int]:
    if not old:
        raise SandboxUsageError("old_text is empty", hint="write_file creates a file")
    count = text.count(old)
    if count == 0:
        raise SandboxUsageError(
            f"{path!r:.120} does not contain old_text", hint="read_file shows the text"
        )
    if count > 1 and not replace_all:
        raise SandboxUsageError(
            f"{path!r:.120} contains old_text {count} times",
            hint="add the lines around it, or set replace_all",
        )
    return text.replace(old, new), count


async def _job_state(sandboxes: Sandboxes, sandbox: str, name: str, wait_s: float) -> JobState:
    job = sandboxes.get(sandbox).job(name)
    taken = await carry(lambda: job.take(wait_s))
    code = job.process.returncode
    return JobState(
        id=name,
        running=code is None,
        exit_code=code,
        output=taken.text(),
        truncated=taken.is_cut,
    )


# Registration.


class Registrar:
    """Registers tools, with an argument ``sandbox`` only if there is more than one."""

    def __init__(self, server: Any, sandboxes: Sandboxes) -> None:
        self._server = server
        self._is_one = sandboxes.limit == 1
        self._is_online = sandboxes.is_online

    def tool(
        self,
        title: str,
        *,
        read_only: bool = False,
        destructive: bool = False,
        idempotent: bool = False,
        runs: bool = False,
    ) -> Callable[[Callable[..., Awaitable[Any]]], None]:
        """Return a decorator that adds a tool with these hints."""
        hints = _sdk.hints(
            read_only=read_only,
            destructive=destructive,
            idempotent=idempotent or read_only,
            open_world=runs and self._is_online,
        )

        def add(function: Callable[..., Awaitable[Any]]) -> None:
            @functools.wraps(function)
            async def call(**arguments: Any) -> Any:
                with _reported():
                    return await function(**{"sandbox": "main", **arguments})

            signature = inspect.signature(function, eval_str=True)
            if self._is_one:
                kept = [p for p in signature.parameters.values() if p.name != "sandbox"]
                signature = signature.replace(parameters=kept)
            call.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
            description = inspect.cleandoc(function.__doc__ or "")
            self._server.tool(title=title, description=description, annotations=hints)(call)

        return add


def register(server: Any, sandboxes: Sandboxes) -> None:
    """Add all tools and resources to ``server``."""
    add = Registrar(server, sandboxes)
    _register_running(add, sandboxes)
    _register_files(add, sandboxes)
    _register_jobs(add, sandboxes)
    if sandboxes.has_checkpoints:
        register_checkpoints(add, sandboxes)
    _register_resources(server, sandboxes)


def _register_running(add: Registrar, sandboxes: Sandboxes) -> None:
    @add.tool("Run a command", destructive=True, runs=True)
    async def run_command(
        command: str,
        ctx: Context,
        timeout_s: Timeout = DEFAULT_TIMEOUT_S,
        cwd: Cwd = ".",
        sandbox: Name = "main",
    ) -> CommandResult:
        """Run shell text in the sandbox and return its exit code and output."""
        session = await sandboxes.get(sandbox).session.opened()
        async with _progress(ctx) as report:
            process = await session.run(
                command,
                stdout=PIPE,
                stderr=PIPE,
                timeout_s=min(timeout_s, sandboxes.max_timeout_s),
                cwd=cwd,
            )
            return await _finished(process, report)

    @add.tool("Run Python code", destructive=True, runs=True)
    async def run_code(
        code: str, ctx: Context, timeout_s: Timeout = DEFAULT_TIMEOUT_S, sandbox: Name = "main"
    ) -> Annotated[CallToolResult, CodeResult]:
        """Run Python in an interpreter that keeps its variables between calls.

        The value of the last expression and figures are returned. A timeout interrupts the code
        and keeps the variables.
        """
        context = await sandboxes.get(sandbox).session.context()
        limit_s = min(timeout_s, sandboxes.max_timeout_s)

        async with _progress(ctx) as report:

            async def run() -> CellResult:
                result: CellOutput | MimeBundle | CellResult | None = None
                async with contextlib.aclosing(
                    context.stream(code, timeout_s=limit_s)  # type: ignore[type-var]
                ) as events:
                    async for result in events:
                        if isinstance(result, CellOutput):
                            report(result.data)
                if not isinstance(result, CellResult):
                    raise SandboxUsageError("the cell was interrupted")
                return result

            return _code_result(await carry(run))

    @add.tool("Install Python packages", runs=True, idempotent=True)
    async def install_packages(
        packages: Annotated[
            list[str], Field(min_length=1, description="Requirements such as 'six>=1.16'.")
        ],
        ctx: Context,
        sandbox: Name = "main",
    ) -> CommandResult:
        """Install packages into the environment of the sandbox, if its network policy allows it."""
        if not sandboxes.is_online:
            raise SandboxUsageError(
                "the network of this sandbox is blocked, so packages cannot be installed",
                hint="the user can start the server with --allow-pypi",
            )
        session = await sandboxes.get(sandbox).session.opened()
        async with _progress(ctx) as report:
            process = await session.run(
                ["uv", "pip", "install", "--", *packages],
                stdout=PIPE,
                stderr=PIPE,
                timeout_s=min(INSTALL_TIMEOUT_S, sandboxes.max_timeout_s),
            )
            return await _finished(process, report)

    @add.tool("Reset the sandbox", destructive=True, idempotent=True)
    async def reset(sandbox: Name = "main") -> Done:
        """End all commands and the interpreter, and begin again in a new sandbox.

        Files are removed too, unless the user has given the sandbox a directory of its own.
        """
        await sandboxes.reset(sandbox)
        return Done(message="The next call uses a new sandbox.")


def _register_files(add: Registrar, sandboxes: Sandboxes) -> None:
    @add.tool("Read a file", read_only=True)
    async def read_file(
        path: Path,
        first_line: Annotated[int, Field(ge=1, description="First line, from 1.")] = 1,
        max_lines: Annotated[int, Field(ge=1, le=10_000)] = 2000,
        sandbox: Name = "main",
    ) -> FileText:
        """Read a text file."""
        session = await sandboxes.get(sandbox).session.opened()
        data = await session.get_bytes(path, max_bytes=64 * 1024 * 1024)
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        text = "".join(lines[first_line - 1 : first_line - 1 + max_lines])
        is_cut = first_line - 1 + max_lines < len(lines) or len(text) > MAX_FILE_BYTES
        return FileText(path=path, text=text[:MAX_FILE_BYTES], size=len(data), truncated=is_cut)

    @add.tool("Write a file", destructive=True, idempotent=True)
    async def write_file(path: Path, content: str, sandbox: Name = "main") -> Changed:
        """Create or replace a text file; missing directories are created."""
        session = await sandboxes.get(sandbox).session.opened()
        written = await session.put_bytes(path, content.encode("utf-8", "surrogateescape"))
        return Changed(path=path, bytes_written=written)

    @add.tool("Edit a file", destructive=True)
    async def edit_file(
        path: Path,
        old_text: str,
        new_text: str,
        *,
        replace_all: bool = False,
        sandbox: Name = "main",
    ) -> Changed:
        """Replace text in a file. Without replace_all, old_text must occur exactly once."""
        session = await sandboxes.get(sandbox).session.opened()
        before = await session.get_bytes(path, max_bytes=64 * 1024 * 1024)
        mode = (await session.stat(path)).mode
        try:
            text = before.decode()
        except UnicodeDecodeError:
            raise SandboxUsageError(f"{path!r:.120} is not a text file in UTF-8") from None
        text, count = _edited(text, old_text, new_text, path, replace_all=replace_all)
        written = await session.put_bytes(path, text.encode(), mode=mode)
        return Changed(path=path, bytes_written=written, replacements=count)

    @add.tool("List files", read_only=True)
    async def list_files(path: Path = ".", sandbox: Name = "main") -> Listing:
        """List a directory."""
        session = await sandboxes.get(sandbox).session.opened()
        found = await session.list_dir(path)
        entries = [Entry(path=e.path, kind=e.kind, size=e.size) for e in found[:MAX_ENTRIES]]
        return Listing(entries=entries, truncated=len(found) > MAX_ENTRIES)


def _register_jobs(add: Registrar, sandboxes: Sandboxes) -> None:
    @add.tool("Start a command", destructive=True, runs=True)
    async def start_command(command: str, cwd: Cwd = ".", sandbox: Name = "main") -> JobState:
        """Start a command that goes on in the background, such as a server."""
        name = await sandboxes.get(sandbox).start(command, cwd=cwd)
        return JobState(id=name, running=True, exit_code=None, output="", truncated=False)

    @add.tool("Check a started command")
    async def check_command(
        id: JobId,  # noqa: A002 - the name that start_command returns
        wait_s: Annotated[
            float, Field(ge=0, le=MAX_WAIT_S, description="Seconds to wait for its end.")
        ] = 0,
        sandbox: Name = "main",
    ) -> JobState:
        """Return the state of a started command and its output since the last call."""
        return await _job_state(sandboxes, sandbox, id, wait_s)

    @add.tool("Stop a started command", destructive=True, idempotent=True)
    async def stop_command(
        id: JobId,  # noqa: A002 - the name that start_command returns
        sandbox: Name = "main",
    ) -> JobState:
        """Stop a started command and return its last output."""
        job = sandboxes.get(sandbox).job(id)
        await carry(lambda: job.stop(STOP_GRACE_S))
        return await _job_state(sandboxes, sandbox, id, 0)


def _register_resources(server: Any, sandboxes: Sandboxes) -> None:
    async def file(path: str) -> bytes | str:
        """A file of the sandbox."""
        with _reported():
            session = await sandboxes.get("main").session.opened()
            name = path if _sdk.IS_2X else unquote(path)
            data = await session.get_bytes(name, max_bytes=MAX_RESOURCE_BYTES)
        kind, _ = mimetypes.guess_type(path)
        if kind is not None and kind.split("/")[0] in {"image", "audio", "video"}:
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    # Templates of the SDK 1.x do not match a slash; there it is sent as %2F.
    template = "sandbox://files/{+path}" if _sdk.IS_2X else "sandbox://files/{path}"
    server.resource(template, name="file", title="A file of the sandbox")(file)
