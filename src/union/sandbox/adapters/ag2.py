"""AG2: an environment for ``SandboxShellTool`` and ``SandboxCodeTool``."""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Self

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("ag2.tools.sandbox", extra="ag2")

from ag2.tools.sandbox.base import ExecResult, SandboxBase  # noqa: E402 - the check comes first

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.adapters._common import WORK_DIR  # noqa: E402 - the check comes first
from union.sandbox.constants import STDOUT  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ag2.context import ConversationContext

__all__ = ["UnionEnvironment", "UnionSandbox"]

TIMEOUT_EXIT_CODE: Final = 124
DEFAULT_TIMEOUT_S: Final = 60.0
MAX_OUTPUT: Final = 100_000


class UnionSandbox(SandboxBase):
    """A sandbox on this machine or on a server, opened at its first use.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        timeout: seconds for a command that names no limit; 60 by default.
        max_output: characters of output to return; 100,000 by default.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them. Without ``host_work_dir``, the work dir is ``/workspace``.

    """

    def __init__(
        self,
        *,
        session: object = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_output: int = MAX_OUTPUT,
        **options: Any,
    ) -> None:
        self._session = LazySession(session, options=options)
        self._timeout_s = timeout
        self._max_output = max_output
        self._is_private = session is None and options.get("host_work_dir") is None
        self._name = options.get("work_dir_name") or WORK_DIR

    def __deepcopy__(self, memo: dict[int, Any]) -> UnionSandbox:
        """Return this sandbox: tools are copied with their agents, sandboxes are shared."""
        return self

    @property
    def workdir(self) -> PurePosixPath:
        """The path of the work dir inside the sandbox."""
        if self._is_private and self._session.id is None:
            return PurePosixPath(self._name)  # known before the sandbox is opened
        return PurePosixPath(self._session.face().work_dir)

    @property
    def host_workdir(self) -> None:
        """None: no tool may touch the live work dir from the host."""
        return

    async def __aenter__(self) -> Self:
        await self._session.opened()
        return self

    async def exec(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
    ) -> ExecResult:
        """Run a command; stdout and stderr are returned in order.

        Args:
            argv: the program and its arguments.
            env: further variables; None (default) for none.
            timeout: seconds; None (default) for that of the sandbox. A command that exceeds it
                ends with exit code 124.

        """
        if not argv:
            return ExecResult(output="", exit_code=2)
        session = await self._session.opened()
        limit_s = self._timeout_s if timeout is None else timeout
        process = await session.run(argv, stderr=STDOUT, env=env, timeout_s=limit_s)
        result = process.result()
        output, code = result.stdout.strip(), result.returncode
        if len(output) > self._max_output:
            note = f"\n[truncated: showing first {self._max_output} of {len(output)} chars]"
            output = output[: self._max_output] + note
        if result.termination_reason == "timeout":
            output = f"{output}\nCommand timed out after {limit_s:g} seconds".strip()
            code = TIMEOUT_EXIT_CODE
        return ExecResult(output=output, exit_code=code)

    async def put_file(self, path: PurePosixPath, content: bytes) -> None:
        """Write a file.

        Args:
            path: a path relative to the work dir.
            content: the bytes to write.

        """
        await _files.write(await self._session.opened(), _relative(path, "put_file"), content)

    async def remove_file(self, path: PurePosixPath) -> None:
        """Remove a file. Succeeds if there is none.

        Args:
            path: a path relative to the work dir.

        """
        session = await self._session.opened()
        with contextlib.suppress(FileNotFoundError):
            await _files.remove(session, _relative(path, "remove_file"))

    async def aclose(self) -> None:
        """End the sandbox, unless the session was given. Closing twice is allowed."""
        await self._session.aclose()


class UnionEnvironment:
    """The environment of tools: ``SandboxShellTool(UnionEnvironment())``.

    All tools that have the same environment share one sandbox. ``aclose()`` ends it, or the end of
    the process.

    Args:
        **options: arguments of ``UnionSandbox``.

    """

    def __init__(self, **options: Any) -> None:
        self._sandbox = UnionSandbox(**options)

    @property
    def workdir(self) -> PurePosixPath:
        """The path of the work dir inside the sandbox."""
        return self._sandbox.workdir

    @contextlib.asynccontextmanager
    async def open(
        self, context: ConversationContext | None = None
    ) -> AsyncGenerator[UnionSandbox, None]:
        """Yield the sandbox; called by the tools.

        Args:
            context: the conversation; not used.

        """
        del context
        yield self._sandbox

    async def aclose(self) -> None:
        """End the sandbox, unless the session was given."""
        await self._sandbox.aclose()


def _relative(path: PurePosixPath, call: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{call} takes paths below the work dir, not {str(path)!r:.120}")
    return str(path)
