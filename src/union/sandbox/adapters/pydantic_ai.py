"""Pydantic AI: a workspace for agents.

``UnionSandbox`` is the capability, ``UnionSandboxBackend`` the workspace backend that it supplies.
"""

from __future__ import annotations

from collections.abc import (
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, end, require_framework

require_framework("pydantic_ai.workspaces", extra="pydantic-ai")

from pydantic_ai.capabilities import AbstractCapability  # noqa: E402 - the check comes first
from pydantic_ai.workspaces import (  # noqa: E402 - the check comes first
    CommandResult,
    WorkspaceBackend,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from union.sandbox.constants import PIPE  # noqa: E402 - the check comes first
from union.sandbox.errors import (  # noqa: E402 - the check comes first
    SandboxCommandError,
    SandboxConnectionError,
    SandboxExecutionError,
    SessionClosedError,
)

if TYPE_CHECKING:
    from pydantic_ai.tools import RunContext

    from union.sandbox._session.session import Session

__all__ = ["PROVIDER", "UnionSandbox", "UnionSandboxBackend"]

PROVIDER: Final = "union"
MAX_OUTPUT_BYTES: Final = 10 * 1024 * 1024


class UnionSandboxBackend(WorkspaceBackend):
    """A workspace in a sandbox. Does no I/O when created: the first operation opens the session.

    The session is never closed here: ``UnionSandbox.destroy(ref)`` closes it, or the end of the
    process.

    Args:
        ref: the workspace to attach to, which must be open in this process; None (default) for a
            new one.
        session: a session to use, which is not closed here; None (default) opens one.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them. Without ``host_work_dir``, the work dir is ``/workspace``.

    """

    def __init__(
        self, *, ref: WorkspaceRef | None = None, session: object = None, **options: Any
    ) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"ref.provider must be {PROVIDER!r}, not {ref.provider!r}")
        self._ref = ref
        if ref is not None:
            self._session = LazySession(session_id=ref.id)
        else:
            self._session = LazySession(session, options=options)

    @property
    def ref(self) -> WorkspaceRef | None:
        """The identity of the workspace; None before its first use."""
        if self._ref is None and self._session.id is not None:
            self._ref = WorkspaceRef(provider=PROVIDER, id=self._session.id)
        return self._ref

    async def _open(self) -> Session:
        try:
            return await self._session.opened()
        except SessionClosedError as exc:
            raise WorkspaceUnavailableError(str(exc)) from exc

    async def working_dir(self) -> str:
        """Return the path of the work dir inside the sandbox."""
        session = await self._open()
        if session._lifecycle.state == "closed":  # noqa: SLF001 - a part of it
            raise WorkspaceUnavailableError("the sandbox was closed")
        return session.work_dir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the protocol's signature
    ) -> CommandResult:
        """Run a command in the work dir and return its exit code and output.

        Args:
            command: a list of strings; with ``shell``, shell text.
            shell: whether ``command`` is shell text; False by default.
            env: further variables; None (default) for none.
            timeout: seconds until the command is ended; None (default) for no limit.

        Raises:
            WorkspaceTimeoutError: the command was ended at ``timeout``.
            WorkspaceOutputLimitError: more than 10 MiB of output.
            WorkspaceUnavailableError: the sandbox is closed, or was closed during the command.

        """
        if isinstance(command, str) is not shell:
            form = "a string" if isinstance(command, str) else "a sequence"
            raise TypeError(f"{form} of arguments does not match shell={shell}")
        session = await self._open()
        try:
            process = await session.run(
                command if isinstance(command, str) else list(command),
                stdout=PIPE,
                stderr=PIPE,
                env=env,
                timeout_s=timeout,
            )
            out, err = await process.communicate_text(max_output_bytes=MAX_OUTPUT_BYTES)
        except (SessionClosedError, SandboxConnectionError) as exc:
            raise WorkspaceUnavailableError(str(exc)) from exc
        except SandboxExecutionError as exc:
            if session._lifecycle.state == "closed":  # noqa: SLF001 - a part of it
                raise WorkspaceUnavailableError(str(exc)) from exc
            raise
        reason = process.termination_reason
        if reason == "closed":
            raise WorkspaceUnavailableError("the sandbox was closed during the command")
        if reason == "timeout":
            raise WorkspaceTimeoutError(
                f"the command was ended after {timeout:g} s", stdout=out, stderr=err
            )
        if process.truncated:
            raise WorkspaceOutputLimitError(
                f"the command wrote more than {MAX_OUTPUT_BYTES} bytes",
                limit=MAX_OUTPUT_BYTES,
                stdout=out,
                stderr=err,
            )
        return CommandResult(exit_code=process.returncode or 0, stdout=out, stderr=err)

    async def realpath(self, path: str) -> str:
        """Resolve links inside the sandbox; missing names are kept.

        Args:
            path: an absolute path.

        """
        session = await self._open()
        try:
            result = await session.exec(["realpath", "-m", "-z", "--", path], check=True)
        except SessionClosedError as exc:
            raise WorkspaceUnavailableError(str(exc)) from exc
        except SandboxCommandError as exc:
            raise OSError(str(exc)) from exc
        return result.stdout.rstrip("\0")


@dataclass(kw_only=True)
class UnionSandbox(AbstractCapability[Any]):
    """The workspace of an agent: ``Agent(..., capabilities=[UnionSandbox(), ...])``.

    It supplies execution only. Combine it with capabilities that use the workspace, such as
    ``Coder``, ``Shell`` or ``FileSystem`` of the harness. A run without a reference gets a new
    sandbox, which outlives the run: ``destroy()`` closes it, or the end of the process.
    """

    session: Any = field(default=None, repr=False)
    """A session to use for every run; None (default) opens one per run."""
    backend: str | None = None
    """The isolation backend; None (default) for bubblewrap, or the server's default."""
    host_work_dir: str | None = None
    """An existing directory to work in; None (default) for a private one."""
    work_dir_name: str | None = None
    """The path of the work dir inside; None (default) for ``/workspace`` if it is private."""
    network_mode: str | None = None
    """``"blocked"``, ``"allowlist"`` or ``"open"``; None (default) for blocked."""
    network_allowlist: Sequence[str] | None = None
    """Hosts that ``"allowlist"`` allows; None (default) for none."""
    env: Mapping[str, str] | None = field(default=None, repr=False)
    """Variables of every command; None (default) for none."""
    read_only_paths: Sequence[str] = ()
    """Further paths to show read-only; none by default."""
    read_write_paths: Sequence[str] = ()
    """Further paths to show writable; none by default."""
    resources: Any = None
    """Limits, as ``Resources`` or a mapping; None (default) for none."""
    endpoint: str | None = None
    """The server to use; None (default) for this machine."""
    token: str | None = field(default=None, repr=False)
    """The token of the server; None (default) for none."""

    def get_workspace(
        self, ctx: RunContext[Any], *, ref: WorkspaceRef | None
    ) -> UnionSandboxBackend | None:
        """Return the workspace of a run; None if ``ref`` is of another provider."""
        del ctx
        if ref is not None:
            return UnionSandboxBackend(ref=ref) if ref.provider == PROVIDER else None
        if self.session is not None:
            return UnionSandboxBackend(session=self.session)
        names = (
            *("backend", "host_work_dir", "work_dir_name", "network_mode", "network_allowlist"),
            *("env", "read_only_paths", "read_write_paths", "resources", "endpoint", "token"),
        )
        return UnionSandboxBackend(**{name: getattr(self, name) for name in names})

    def workspace(self, ref: WorkspaceRef) -> UnionSandboxBackend:
        """Return the backend of an existing workspace.

        Args:
            ref: the reference that a backend had.

        """
        return UnionSandboxBackend(ref=ref)

    async def destroy(self, ref: WorkspaceRef) -> None:
        """Close a sandbox of this process. Closing twice is allowed.

        Args:
            ref: the reference that a backend had.

        """
        if ref.provider != PROVIDER:
            raise ValueError(f"ref.provider must be {PROVIDER!r}, not {ref.provider!r}")
        import asyncio

        await asyncio.to_thread(end, ref.id)
