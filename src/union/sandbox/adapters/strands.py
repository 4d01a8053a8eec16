"""Strands Agents: a sandbox for ``Agent(sandbox=...)`` with streamed output."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("strands.sandbox", extra="strands-agents")

from strands.sandbox.base import Sandbox  # noqa: E402 - the check comes first
from strands.sandbox.constants import (  # noqa: E402 - the check comes first
    ENV_KEY_PATTERN,
    LANGUAGE_PATTERN,
)
from strands.sandbox.errors import (  # noqa: E402 - the check comes first
    SandboxPathNotFoundError,
    SandboxTimeoutError,
)
from strands.sandbox.types import (  # noqa: E402 - the check comes first
    ExecutionResult,
    FileInfo,
    StreamChunk,
)

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.constants import PIPE  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from union.sandbox._session.process import SandboxProcess

__all__ = ["UnionSandbox"]

MAX_OUTPUT_BYTES: Final = 64 * 1024 * 1024
"""Bytes of each stream that a result contains; all of them are streamed."""


class UnionSandbox(Sandbox):
    """A sandbox on this machine or on a server, opened at its first use.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them.

    """

    def __init__(self, *, session: object = None, **options: Any) -> None:
        super().__init__()
        self._session = LazySession(session, options=options)

    def close(self) -> None:
        """End the sandbox, unless the session was given."""
        self._session.close()

    # Commands.

    async def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **_: Any,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        """Run a shell command; yield its output as it arrives, and its result at the end."""
        async for event in self._stream(command, None, timeout, cwd, env):
            yield event

    async def execute_code_streaming(
        self,
        code: str,
        language: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **_: Any,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        """Run code by an interpreter, such as ``python3``, which reads it from stdin."""
        if not LANGUAGE_PATTERN.fullmatch(language):
            raise ValueError(f"language parameter contains invalid characters: {language}")
        async for event in self._stream([language], code.encode(), timeout, cwd, env):
            yield event

    async def _stream(
        self,
        command: str | list[str],
        stdin: bytes | None,
        timeout_s: float | None,
        cwd: str | None,
        env: dict[str, str] | None,
    ) -> AsyncGenerator[StreamChunk | ExecutionResult, None]:
        for name in env or {}:
            if not ENV_KEY_PATTERN.fullmatch(name):
                raise ValueError(f"invalid environment variable name: {name}")
        session = await self._session.opened()
        process = await session.run(
            command, stdin=stdin, stdout=PIPE, stderr=PIPE, cwd=cwd, env=env, timeout_s=timeout_s
        )
        kept: dict[str, list[str]] = {"stdout": [], "stderr": []}
        try:
            async for chunk in _merged(process):
                kept[chunk.stream_type].append(chunk.data)
                yield chunk
            code = await process.wait()
        finally:
            if process.returncode is None:  # the caller stopped reading, or was cancelled
                process.kill()
        out, err = "".join(kept["stdout"]), "".join(kept["stderr"])
        if process.termination_reason == "timeout":
            raise SandboxTimeoutError(timeout_s, out, err)
        yield ExecutionResult(exit_code=code, stdout=out, stderr=err)

    # Files.

    async def read_file(self, path: str, **_: Any) -> bytes:
        """Return the content of a file."""
        return await _files.read(await self._session.opened(), path)

    async def write_file(self, path: str, content: bytes, **_: Any) -> None:
        """Write a file; missing directories are created."""
        await _files.write(await self._session.opened(), path, content)

    async def remove_file(self, path: str, **_: Any) -> None:
        """Remove a file."""
        await _files.remove(await self._session.opened(), path)

    async def list_files(self, path: str, **_: Any) -> list[FileInfo]:
        """Return the entries of a directory, sorted by name."""
        try:
            entries = await _files.listing(await self._session.opened(), path)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise SandboxPathNotFoundError(path) from exc
        found = [FileInfo(name=e.name, is_dir=e.is_dir, size=e.size) for e in entries]
        return sorted(found, key=lambda entry: entry.name)


async def _merged(process: SandboxProcess) -> AsyncGenerator[StreamChunk, None]:
    """Yield the chunks of both streams as they arrive."""
    queue: asyncio.Queue[StreamChunk | BaseException | None] = asyncio.Queue(maxsize=16)

    async def read(name: Any, source: Any) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for data in source:
            text = decoder.decode(data)
            if text:
                await queue.put(StreamChunk(data=text, stream_type=name))
        if rest := decoder.decode(b"", final=True):
            await queue.put(StreamChunk(data=rest, stream_type=name))

    async def read_both() -> None:
        try:
            await asyncio.gather(
                read("stdout", process.iter_stdout()), read("stderr", process.iter_stderr())
            )
        except Exception as exc:  # noqa: BLE001 - the reader of the queue raises it
            await queue.put(exc)
        else:
            await queue.put(None)

    reader = asyncio.create_task(read_both())
    try:
        while (event := await queue.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        reader.cancel()
