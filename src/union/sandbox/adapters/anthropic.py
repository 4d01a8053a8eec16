"""Anthropic SDK: the toolset ``agent_toolset_20260401``, with every tool inside a sandbox.

The SDK's reference tools run ``bash`` on the host and resolve file names on the host's side of the
work dir. Here ``bash`` is a shell of the sandbox, and the SDK's own file tools are executed by an
interpreter inside the sandbox.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, carry, require_framework

require_framework("anthropic.lib.tools", extra="anthropic")

import anyio  # noqa: E402 - a part of the SDK
from anthropic.lib.tools import (  # noqa: E402 - the check comes first
    ToolError,
    beta_async_tool,
)
from anthropic.lib.tools import agent_toolset as sdk  # noqa: E402 - the check comes first

from union.sandbox.constants import PIPE, STDOUT  # noqa: E402 - the check comes first
from union.sandbox.errors import SandboxUsageError  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from union.sandbox._contexts.values import CellResult
    from union.sandbox._session.process import SandboxProcess

__all__ = ["UnionBashSession", "agent_toolset"]

FILE_TOOLS: Final = ("read", "write", "edit", "glob", "grep")
_REFERENCES: Final = {
    name: getattr(sdk, f"beta_{name}_tool")(sdk.AgentToolContext(workdir="/"))
    for name in ("bash", *FILE_TOOLS)
}
"""The SDK's own tools, for their schemas and descriptions."""
MAX_RESULT_BYTES: Final = 64 * 1024 * 1024
_SHELL: Final = ["/bin/bash", "--noprofile", "--norc"]
_VARIABLES: Final = {"PS1": "", "PS2": "", "TERM": "dumb"}

# Runs inside the sandbox, where the packages of this program can be imported.
_DRIVER: Final = """
import asyncio as _asyncio, json as _json, pathlib as _pathlib
from anthropic.lib.tools import ToolError as _ToolError
from anthropic.lib.tools import agent_toolset as _sdk

def _call_tool(name, settings, arguments):
    settings = _json.loads(settings)
    for key in ("allowed_roots", "read_only_roots"):
        settings[key] = [_pathlib.Path(path) for path in settings[key]]
    tool = getattr(_sdk, f"beta_{name}_tool")(_sdk.AgentToolContext(**settings))
    try:
        return _json.dumps({"value": _asyncio.run(tool.call(_json.loads(arguments)))})
    except _ToolError as exc:
        return _json.dumps({"error": exc.content})
    except (TypeError, ValueError) as exc:
        return _json.dumps({"invalid": str(exc)})
"""


class _Pipe:
    """stdin and stdout of a process, in the shape of anyio's byte streams."""

    def __init__(self, process: SandboxProcess) -> None:
        self._process = process
        self._chunks = process.iter_stdout()
        self._rest = b""

    async def send(self, data: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise anyio.ClosedResourceError

        async def write() -> None:
            stdin.write(data)
            await stdin.drain()

        await carry(write)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._rest:
            try:
                self._rest = await anext(self._chunks)
            except StopAsyncIteration:
                raise anyio.EndOfStream from None
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data

    async def aclose(self) -> None:
        stdin = self._process.stdin
        if stdin is not None:

            async def close() -> None:
                stdin.close()

            await carry(close)


class _Process:
    """A command of a session in the shape of ``anyio.abc.Process``."""

    def __init__(self, process: SandboxProcess, session: LazySession | None) -> None:
        self._process = process
        self._session = session
        self.stdin = self.stdout = _Pipe(process)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        return await self._process.wait()

    async def aclose(self) -> None:
        """Release the process; close the session that was opened for it."""
        if self._session is not None:
            await self._session.aclose()


class UnionBashSession(sdk.BashSession):
    """The SDK's ``BashSession`` with its shell in a sandbox.

    ``start()`` opens a sandbox for the directory; ``within()`` uses an open one.
    """

    @classmethod
    async def start(
        cls,
        workdir: str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> UnionBashSession:
        """Open a sandbox with a directory of this machine as its work dir, and start a shell.

        Args:
            workdir: the directory.
            env: the variables of the shell; None (default) for none. Variables of this process
                are never passed on.
            **options: further arguments of ``on_device.session()``.

        """
        session = LazySession(options={"host_work_dir": workdir, **options})
        return cls(_Process(await _started(session, env), session))

    @classmethod
    async def within(
        cls, session: LazySession, *, env: Mapping[str, str] | None = None
    ) -> UnionBashSession:
        """Start a shell in a sandbox, which stays open when the shell is closed."""
        return cls(_Process(await _started(session, env), None))


async def _started(session: LazySession, env: Mapping[str, str] | None) -> SandboxProcess:
    live = await session.opened()
    return await live.run(
        _SHELL,
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        background=True,
        env={**(env or {}), **_VARIABLES},
    )


def agent_toolset(
    ctx: sdk.AgentToolContext | None = None, *, session: object = None, **options: Any
) -> list[Any]:
    """Return ``bash``, ``read``, ``write``, ``edit``, ``glob`` and ``grep``, all in one sandbox.

    Use it where ``beta_agent_toolset_20260401(ctx)`` is used. The runner of the SDK closes the
    sandbox with the tool ``bash``.

    Args:
        ctx: the SDK's context: its ``workdir`` becomes the work dir of the sandbox, and its limits
            apply. None (default) for a private work dir.
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``.

    """
    if session is not None and ctx is not None:
        raise SandboxUsageError("pass either ctx or session", argument="session")
    if ctx is not None:
        roots = [str(root) for root in ctx.allowed_roots]
        options = {"host_work_dir": ctx.workdir, "read_write_paths": roots, **options}
    sandbox = _Sandbox(LazySession(session, options=options), ctx)
    return [sandbox.bash(), *(sandbox.file_tool(name) for name in FILE_TOOLS)]


class _Sandbox:
    """The sandbox that six tools share."""

    def __init__(self, session: LazySession, ctx: sdk.AgentToolContext | None) -> None:
        self._session = session
        self._ctx = ctx
        self._has_driver = False
        self._lock = asyncio.Lock()

    def bash(self) -> Any:
        reference = _REFERENCES["bash"]
        shell: list[UnionBashSession] = []

        async def started() -> UnionBashSession:
            if not shell:
                env = None if self._ctx is None else self._ctx.env
                shell.append(await UnionBashSession.within(self._session, env=env))
            return shell[0]

        async def bash(
            command: str | None = None,
            restart: bool | None = None,  # noqa: FBT001 - an argument of the tool
            timeout_ms: int | None = None,
        ) -> str:
            """Run a command in a persistent bash shell."""
            if restart:
                if shell:
                    await shell.pop().close()
                await started()
                return "bash session restarted"
            if not command:
                raise ToolError("bash: command is required")
            limit_s = timeout_ms / 1000.0 if timeout_ms else sdk.BASH_DEFAULT_TIMEOUT
            try:
                output, code = await (await started()).exec(command, timeout=limit_s)
            except (RuntimeError, TimeoutError) as exc:
                raise ToolError(f"bash: {exc}") from exc
            if code != 0:
                raise ToolError(output)
            return output

        async def close() -> None:
            if shell:
                await shell.pop().close()
            await self._session.aclose()

        tool = beta_async_tool(bash, name="bash", input_schema=reference.input_schema)
        tool.close = close
        return tool

    def file_tool(self, name: str) -> Any:
        """Return a tool of the SDK whose function is executed inside the sandbox."""
        reference = _REFERENCES[name]

        async def call(**arguments: Any) -> Any:
            return await self._inside(name, arguments)

        tool = beta_async_tool(
            call, name=name, description=reference.description, input_schema=reference.input_schema
        )

        async def checked(arguments: object) -> Any:
            if not isinstance(arguments, dict):
                raise TypeError(f"Input must be a dictionary, got {type(arguments).__name__}")
            return await self._inside(name, arguments)

        tool.call = checked
        return tool

    async def _inside(self, name: str, arguments: dict[str, Any]) -> Any:
        context = await self._session.context()
        live = await self._session.opened()
        settings: dict[str, Any] = {
            "workdir": live.work_dir,
            "allowed_roots": [],
            "read_only_roots": [],
        }
        if self._ctx is not None:
            for key in ("allowed_roots", "read_only_roots"):
                settings[key] = [str(path) for path in getattr(self._ctx, key)]
            for key in ("max_file_bytes", "max_image_base64_bytes", "max_pdf_bytes"):
                value = getattr(self._ctx, key)
                if value is None or isinstance(value, int):
                    settings[key] = value
        cell = f"_call_tool({name!r}, {json.dumps(settings)!r}, {json.dumps(arguments)!r})"

        async def run() -> CellResult:
            async with self._lock:
                if not self._has_driver or not context.alive:
                    await context.run(_DRIVER, check=True)
                    self._has_driver = True
                return await context.run(cell, max_output_bytes=MAX_RESULT_BYTES)

        return _decoded(name, await carry(run))


def _decoded(name: str, result: CellResult) -> Any:
    """Return the result of a file tool; everything that arrives is checked."""
    if result.error is not None or result.ended or result.text is None:
        why = result.reason if result.error is None else result.error.value
        raise ToolError(f"{name}: {why[:500]}")
    import ast

    try:
        answer = json.loads(ast.literal_eval(result.text))
    except (ValueError, SyntaxError) as exc:
        raise ToolError(f"{name}: the sandbox returned no valid result") from exc
    if "error" in answer:
        raise ToolError(answer["error"])
    if "invalid" in answer:
        raise ValueError(answer["invalid"])
    return answer["value"]
