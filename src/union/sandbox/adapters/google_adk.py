"""Google ADK: an environment for agents' tools, and a code executor that keeps variables."""

from __future__ import annotations

import mimetypes
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("google.adk", extra="google-adk")

from google.adk.code_executors.base_code_executor import (  # noqa: E402 - the check comes first
    BaseCodeExecutor,
)
from google.adk.code_executors.code_execution_utils import (  # noqa: E402 - the check comes first
    CodeExecutionInput,
    CodeExecutionResult,
    File,
)
from google.adk.environment import BaseEnvironment, ExecutionResult  # noqa: E402 - see above
from pydantic import PrivateAttr  # noqa: E402 - a part of ADK

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.adapters._common import carry  # noqa: E402 - the check comes first
from union.sandbox.constants import PIPE  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext

    from union.sandbox._contexts.values import CellResult
    from union.sandbox._session.session import Session

__all__ = ["UnionCodeExecutor", "UnionEnvironment"]

MAX_OUTPUT_BYTES: Final = 10 * 1024 * 1024
MAX_FILES: Final = 32
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
IMAGES: Final = {"image/png": "png", "image/jpeg": "jpeg", "image/svg+xml": "svg"}


class UnionEnvironment(BaseEnvironment):
    """A sandbox for ``EnvironmentToolset(environment=...)``.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them. Without ``host_work_dir``, the work dir is ``/workspace``.

    """

    def __init__(self, *, session: object = None, **options: Any) -> None:
        self._session = LazySession(session, options=options)
        self._work_dir: str | None = None

    @property
    def working_dir(self) -> Path:
        """The path of the work dir inside the sandbox."""
        if self._work_dir is None:
            raise RuntimeError("the environment is not initialized: await initialize() first")
        return Path(self._work_dir)

    async def initialize(self) -> None:
        """Open the sandbox. Calling it twice is allowed."""
        self._work_dir = (await self._session.opened()).work_dir
        self.is_initialized = True

    async def close(self) -> None:
        """End the sandbox, unless the session was given. Closing twice is allowed."""
        self.is_initialized = False
        await self._session.aclose()

    async def execute(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
    ) -> ExecutionResult:
        """Run a shell command in the work dir.

        Args:
            command: shell text.
            timeout: seconds; None (default) for no limit.

        """
        session = await self._session.opened()
        process = await session.run(command, stdout=PIPE, stderr=PIPE, timeout_s=timeout)
        out, err = await process.communicate_text(max_output_bytes=MAX_OUTPUT_BYTES)
        return ExecutionResult(
            exit_code=process.returncode or 0,
            stdout=out,
            stderr=err,
            timed_out=process.termination_reason == "timeout",
        )

    async def read_file(self, path: Path) -> bytes:
        """Return the content of a file.

        Args:
            path: an absolute path inside, or one relative to the work dir.

        """
        return await _files.read(await self._session.opened(), str(path))

    async def write_file(self, path: Path, content: str | bytes) -> None:
        """Write a file; missing directories are created.

        Args:
            path: an absolute path inside, or one relative to the work dir.
            content: text or bytes.

        """
        data = content.encode() if isinstance(content, str) else content
        await _files.write(await self._session.opened(), str(path), data)


class UnionCodeExecutor(BaseCodeExecutor):
    """Runs the Python code of an agent in a sandbox: ``Agent(code_executor=...)``.

    It is stateful: executions with the same id share their variables. Files that the code writes
    into the work dir, and pictures that it displays, are returned.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        **options: fields of ``BaseCodeExecutor``; the others are arguments of
            ``on_device.session()``, or of ``remote.session()`` if ``endpoint`` is among them.

    """

    stateful: bool = True
    _session: LazySession = PrivateAttr()

    def __init__(self, *, session: object = None, **options: Any) -> None:
        fields = {name: options.pop(name) for name in list(options) if name in _FIELDS}
        super().__init__(**fields)
        self._session = LazySession(session, options=options)

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        """Run code and return its output and the files that it has written.

        Args:
            invocation_context: the invocation of the agent; not used.
            code_execution_input: the code, files for it, and the id of its variables.

        """
        del invocation_context
        return self._session.call(lambda session: self._execute(session, code_execution_input))

    async def _execute(self, session: Session, given: CodeExecutionInput) -> CodeExecutionResult:
        for file in given.input_files:
            data = file.content.encode() if isinstance(file.content, str) else file.content
            await _files.write(session, posixpath.basename(file.name), data)
        before = await self._files_of(session)
        context = await self._session.context(name=given.execution_id or "main")
        result = await carry(lambda: context.run(given.code, timeout_s=self.timeout_seconds))
        after = await self._files_of(session)
        changed = [name for name in after if after[name] != before.get(name)]
        files = [
            File(
                name=name,
                content=await _files.read(session, name),
                mime_type=mimetypes.guess_type(name)[0] or "application/octet-stream",
            )
            for name in changed[:MAX_FILES]
        ]
        return CodeExecutionResult(
            stdout=result.stdout, stderr=_stderr(result), output_files=[*files, *_images(result)]
        )

    @staticmethod
    async def _files_of(session: Session) -> dict[str, tuple[int, float]]:
        return {
            entry.name: (entry.size, entry.mtime)
            for entry in await _files.listing(session, ".")
            if entry.kind == "f" and entry.size <= MAX_FILE_BYTES
        }

    def close(self) -> None:
        """End the sandbox, unless the session was given. Closing twice is allowed."""
        self._session.close()


_FIELDS: Final = frozenset(BaseCodeExecutor.model_fields)


def _stderr(result: CellResult) -> str:
    text = result.stderr
    if result.error is not None:
        text += result.error.traceback or f"{result.error.name}: {result.error.value}"
    if result.ended:
        text += f"The code was ended: {result.ended}: {result.reason}"
    return text


def _images(result: CellResult) -> list[File]:
    found: list[File] = []
    for bundle in result.results:
        for mime, suffix in IMAGES.items():
            data = bundle.data.get(mime)
            if data is not None:
                content = data.encode() if isinstance(data, str) else data
                name = f"display-{result.number}-{len(found) + 1}.{suffix}"
                found.append(File(name=name, content=content, mime_type=mime))
                break
    return found
