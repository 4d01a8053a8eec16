"""CrewAI: tools that run commands and Python code and use files in a sandbox."""

from __future__ import annotations

import base64
import binascii
import builtins
from typing import TYPE_CHECKING, Any, Final, Literal

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("crewai.tools", extra="crewai")

from crewai.tools import BaseTool  # noqa: E402 - the check comes first
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr  # noqa: E402 - a part of CrewAI

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.adapters._common import carry  # noqa: E402 - the check comes first
from union.sandbox.errors import SandboxUsageError  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from union.sandbox._contexts.values import CellResult
    from union.sandbox._session.session import Session

__all__ = ["UnionExecTool", "UnionFileTool", "UnionPythonTool", "UnionSandbox", "sandbox_tools"]

MAX_OUTPUT_BYTES: Final = 256 * 1024
"""Bytes of each stream that a result contains: models pay for what they read."""
MAX_FILE_BYTES: Final = 256 * 1024

FileAction = Literal["read", "write", "append", "list", "delete", "mkdir", "exists"]


class UnionSandbox:
    """A sandbox that several tools share, opened at its first use.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them. Without ``host_work_dir``, the work dir is ``/workspace``.

    """

    def __init__(self, *, session: object = None, **options: Any) -> None:
        self._session = LazySession(session, options=options)

    def call(self, begin: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
        """Open the session and return the result of ``begin(session)``."""
        return self._session.call(begin)

    async def run_cell(self, code: str, timeout_s: float | None) -> CellResult:
        """Run code in the interpreter of the sandbox, which keeps its variables."""
        context = await self._session.context()
        return await carry(lambda: context.run(code, timeout_s=timeout_s))

    def close(self) -> None:
        """End the sandbox, unless the session was given. Closing twice is allowed."""
        self._session.close()


class _Tool(BaseTool):
    """The part that the tools share.

    Args:
        sandbox: the sandbox to use, which the tool does not close; None (default) for one of its
            own.
        session: a session to use, which is not closed here; None (default) opens one.
        **options: fields of the tool, such as ``name``; the others are arguments of
            ``on_device.session()``, or of ``remote.session()`` if ``endpoint`` is among them.

    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    _sandbox: UnionSandbox = PrivateAttr()

    def __init__(
        self, *, sandbox: UnionSandbox | None = None, session: object = None, **options: Any
    ) -> None:
        fields = {name: options.pop(name) for name in list(options) if name in self.model_fields}
        super().__init__(**fields)
        if sandbox is not None and (session is not None or options):
            raise SandboxUsageError(
                "sandbox= was given together with options of a sandbox", argument="sandbox"
            )
        self._sandbox = UnionSandbox(session=session, **options) if sandbox is None else sandbox

    def close(self) -> None:
        """End the sandbox, unless a session or an open sandbox was given to it."""
        self._sandbox.close()


class _ExecArguments(BaseModel):
    command: str = Field(description="Shell command to run in the sandbox.")
    cwd: str | None = Field(default=None, description="Start directory, if not the work dir.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds until it is ended.")


class UnionExecTool(_Tool):
    """Runs shell commands. Files, ``/tmp`` and background processes persist between calls."""

    name: str = "Sandbox shell"
    description: str = (
        "Run a shell command in an isolated sandbox; returns exit_code, stdout and stderr. "
        "Files and background processes persist between calls."
    )
    args_schema: builtins.type[BaseModel] = _ExecArguments

    def _run(
        self, command: str, cwd: str | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        async def run(session: Session) -> dict[str, Any]:
            result = await session.exec(
                command, cwd=cwd, timeout_s=timeout, max_output_bytes=MAX_OUTPUT_BYTES
            )
            return {
                "exit_code": result.returncode,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "truncated": bool(result.truncated),
                "error": result.termination_reason or None,
            }

        return _answer(lambda: self._sandbox.call(run))


class _PythonArguments(BaseModel):
    code: str = Field(description="Python code to run.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds until it is ended.")


class UnionPythonTool(_Tool):
    """Runs Python code in an interpreter that keeps its variables between calls."""

    name: str = "Sandbox Python"
    description: str = (
        "Run Python code in an isolated sandbox; returns stdout, stderr, the value of the last "
        "expression as text, and an error. Variables persist between calls."
    )
    args_schema: builtins.type[BaseModel] = _PythonArguments

    def _run(self, code: str, timeout: float | None = None) -> dict[str, Any]:
        async def run(session: Session) -> dict[str, Any]:
            del session
            result = await self._sandbox.run_cell(code, timeout)
            error = None
            if result.ended:
                error = f"ended: {result.ended}: {result.reason}"
            elif result.error is not None:
                error = f"{result.error.name}: {result.error.value}\n{result.error.traceback}"
            return {
                "stdout": result.stdout[-MAX_OUTPUT_BYTES:],
                "stderr": result.stderr[-MAX_OUTPUT_BYTES:],
                "text": result.text,
                "error": error,
            }

        return _answer(lambda: self._sandbox.call(run))


class _FileArguments(BaseModel):
    action: FileAction = Field(
        description="read, write (create or replace), append, list, delete, mkdir or exists."
    )
    path: str = Field(description="Path in the sandbox, absolute or relative to the work dir.")
    content: str | None = Field(default=None, description="Text for write and append.")
    binary: bool = Field(default=False, description="Whether content is base64.")
    depth: int = Field(default=1, ge=1, description="Levels that list shows.")


class UnionFileTool(_Tool):
    """Reads, writes and lists files, by commands inside the sandbox."""

    name: str = "Sandbox files"
    description: str = (
        "Use files in an isolated sandbox: read, write, append, list, delete, mkdir, exists."
    )
    args_schema: builtins.type[BaseModel] = _FileArguments

    def _run(
        self,
        action: FileAction,
        path: str,
        content: str | None = None,
        binary: bool = False,  # noqa: FBT001, FBT002 - an argument of the tool
        depth: int = 1,
    ) -> dict[str, Any]:
        async def run(session: Session) -> dict[str, Any]:
            return {"path": path, **await self._act(session, action, path, content, binary, depth)}

        return _answer(lambda: self._sandbox.call(run))

    @staticmethod
    async def _act(  # noqa: PLR0917 - the arguments of the tool
        session: Session,
        action: FileAction,
        path: str,
        content: str | None,
        binary: bool,  # noqa: FBT001 - an argument of the tool
        depth: int,
    ) -> dict[str, Any]:
        match action:
            case "read":
                return _shown(await _files.read(session, path, max_bytes=MAX_FILE_BYTES), binary)
            case "write" | "append":
                data = _bytes(content or "", binary)
                if action == "append" and await _files.exists(session, path):
                    data = await _files.read(session, path) + data
                await _files.write(session, path, data)
                return {"bytes_written": len(data)}
            case "list":
                entries = await _files.listing(session, path, depth=depth)
                kinds = {"d": "dir", "f": "file", "l": "symlink"}
                return {
                    "entries": [
                        {"path": e.path, "kind": kinds.get(e.kind, "other"), "size": e.size}
                        for e in entries
                    ]
                }
            case "delete":
                await _files.remove(session, path, recursive=True)
                return {"status": "deleted"}
            case "mkdir":
                await _files.make_dir(session, path)
                return {"status": "created"}
            case "exists":
                return {"exists": await _files.exists(session, path)}


def sandbox_tools(*, session: object = None, **options: Any) -> list[BaseTool]:
    """Return a shell, a Python and a file tool that share one sandbox.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them.

    """
    sandbox = UnionSandbox(session=session, **options)
    return [
        UnionExecTool(sandbox=sandbox),
        UnionPythonTool(sandbox=sandbox),
        UnionFileTool(sandbox=sandbox),
    ]


def _answer(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a call; errors of files and arguments are for the model to read."""
    try:
        return call()
    except (OSError, SandboxUsageError, binascii.Error) as exc:
        return {"error": f"{type(exc).__name__}: {exc}"}


def _bytes(content: str, is_binary: bool) -> bytes:  # noqa: FBT001 - passed on
    return base64.b64decode(content, validate=True) if is_binary else content.encode()


def _shown(data: bytes, is_binary: bool) -> dict[str, Any]:  # noqa: FBT001 - passed on
    if not is_binary:
        try:
            return {"encoding": "utf-8", "content": data.decode()}
        except UnicodeDecodeError:
            pass
    return {"encoding": "base64", "content": base64.b64encode(data).decode()}
