"""Inspect: the sandbox environment ``union`` for tasks and agents.

Inspect finds it by an entry point: ``Task(..., sandbox="union")``, or ``sandbox=("union",
UnionSandboxConfig(...))``.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("inspect_ai", extra="inspect-ai")

from inspect_ai.util import (  # noqa: E402 - the check comes first
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import (  # noqa: E402 - the check comes first
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402 - a part of inspect_ai

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.constants import PIPE  # noqa: E402 - the check comes first
from union.sandbox.errors import (  # noqa: E402 - the check comes first
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)

if TYPE_CHECKING:
    from union.sandbox._session.session import Session

__all__ = ["UnionSandboxConfig", "UnionSandboxEnvironment"]

NOT_EXECUTABLE: Final = 126


class UnionSandboxConfig(BaseModel):
    """Arguments of ``on_device.session()``, or of ``remote.session()`` with ``endpoint``."""

    model_config = ConfigDict(extra="allow", frozen=True)

    token: str | None = Field(default=None, exclude=True, repr=False)
    """The token of a server, which no log contains; None (default) for none."""


@sandboxenv(name="union")
class UnionSandboxEnvironment(SandboxEnvironment):
    """One sandbox per sample. Its work dir is ``/workspace`` by default."""

    def __init__(self, session: LazySession) -> None:
        super().__init__()
        self._session = session

    # The life of a sample.

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Open the sandbox of a sample."""
        del task_name, metadata
        session = LazySession(options=_options(config))
        await session.opened()
        return {"default": cls(session)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: FBT001 - its signature
    ) -> None:
        """Close the sandboxes of a sample."""
        del task_name, config, interrupted
        for environment in environments.values():
            await environment.as_type(cls)._session.aclose()  # noqa: SLF001 - of this class

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log contains."""
        return UnionSandboxConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """Return the number of samples at a time: two for each processor."""
        return 2 * (os.cpu_count() or 1)

    # Commands and files.

    async def exec(  # noqa: PLR0917 - its signature
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - its signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - its signature
        timeout_retry: bool = True,  # noqa: FBT001, FBT002 - its signature
        concurrency: bool = True,  # noqa: FBT001, FBT002 - its signature
    ) -> ExecResult[str]:
        """Run a command in the sandbox."""
        del timeout_retry, concurrency  # a timeout is exact, and nothing is spawned on the host
        if user is not None:
            raise SandboxUserUnsupportedError(
                f"a command in this sandbox cannot run as {user!r}: it has one user"
            )
        session = await self._open()
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            process = await session.run(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input,
                stdout=PIPE,
                stderr=PIPE,
                cwd=cwd,
                env=env,
                timeout_s=timeout,
            )
            out, err = await process.communicate_text(max_output_bytes=limit)
        except SessionClosedError as exc:
            raise SandboxUnavailableError(str(exc)) from exc
        except SandboxExecutionError as exc:
            raise SandboxUnavailableError(str(exc)) from exc
        except SandboxUsageError as exc:
            return ExecResult(success=False, returncode=1, stdout="", stderr=str(exc))
        if process.termination_reason == "timeout":
            raise TimeoutError(f"the command was ended after {timeout} s")
        if process.termination_reason == "closed":
            raise SandboxUnavailableError("the sandbox was closed during the command")
        if process.truncated:
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, truncated_output=out
            )
        code = process.returncode or 0
        if code == NOT_EXECUTABLE and "cannot be executed: Permission denied" in err:
            raise PermissionError(err.strip())
        return ExecResult(success=code == 0, returncode=code, stdout=out, stderr=err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file; missing directories are created."""
        data = contents.encode() if isinstance(contents, str) else contents
        await _files.write(await self._open(), file, data)

    async def read_file(self, file: str, text: bool = True) -> Any:  # noqa: FBT001, FBT002 - its signature
        """Return the content of a file."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await _files.read(await self._open(), file, max_bytes=limit)
        except OSError as exc:
            if exc.errno != errno.EFBIG:
                raise
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, truncated_output=None
            ) from exc
        return data.decode("utf-8") if text else data

    async def _open(self) -> Session:
        try:
            return await self._session.opened()
        except SessionClosedError as exc:
            raise SandboxUnavailableError(str(exc)) from exc


def _options(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, UnionSandboxConfig):
        return {**config.model_dump(), "token": config.token}
    if isinstance(config, BaseModel):
        return config.model_dump()
    if isinstance(config, dict):
        return dict(config)
    raise SandboxUsageError(
        f"the configuration of the sandbox 'union' must be a mapping, not {config!r:.80}",
        hint='sandbox=("union", UnionSandboxConfig(network_mode="blocked"))',
    )
