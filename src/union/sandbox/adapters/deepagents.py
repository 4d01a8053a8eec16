"""deepagents: a sandbox for ``create_deep_agent()``, and a provider for Deep Agents Code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from union.sandbox.adapters._common import WORK_DIR, LazySession, end, require_framework

require_framework("deepagents", extra="deepagents")

from deepagents.backends.protocol import (  # noqa: E402 - the check comes first
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox  # noqa: E402 - the check comes first

from union.sandbox.adapters import _files  # noqa: E402 - the check comes first
from union.sandbox.constants import STDOUT  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from union.sandbox._session.session import Session

__all__ = ["UnionSandbox", "UnionSandboxProvider"]  # noqa: F822 - see __getattr__

TIMEOUT_EXIT_CODE: Final = 124
DEFAULT_TIMEOUT_S: Final = 30 * 60
MAX_OUTPUT_BYTES: Final = 512 * 1024


class UnionSandbox(BaseSandbox):
    """A sandbox on this machine or on a server, for ``create_deep_agent(backend=...)``.

    It is opened at its first use and closed by ``close()``, by a ``with`` block, or when the
    process ends. Usable from any thread and any event loop.

    Args:
        session: a session to use, which is not closed here; None (default) opens one.
        timeout: seconds for a command that names no limit; 1800 by default, 0 for no limit.
        max_output_bytes: bytes of output to return; 512 KiB by default.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them. Without ``host_work_dir``, the work dir is ``/workspace``.

    """

    def __init__(
        self,
        *,
        session: object = None,
        timeout: int = DEFAULT_TIMEOUT_S,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        **options: Any,
    ) -> None:
        self._session = LazySession(session, options=options)
        self._timeout = timeout
        self._max_output_bytes = max_output_bytes

    @property
    def id(self) -> str:
        """The id of the session, which this opens."""
        return self._session.face().id

    @property
    def work_dir(self) -> str:
        """The path of the work dir inside the sandbox."""
        return self._session.face().work_dir

    def close(self) -> None:
        """End the sandbox, unless the session was given."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Commands.

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command; stdout and stderr are returned in order.

        Args:
            command: shell text.
            timeout: seconds; None (default) for that of the sandbox, 0 for no limit. A command
                that exceeds it ends with exit code 124.

        """
        session = self._session.face()
        limit_s = self._timeout if timeout is None else timeout
        process = session.run(
            command,
            stderr=STDOUT,
            timeout_s=limit_s or None,
            max_output_bytes=self._max_output_bytes,
        )
        return _response(process.result(), limit_s)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:  # noqa: ASYNC109 - its signature
        """Run a shell command, as ``execute()``; cancelling this call kills it."""
        session = await self._session.opened()
        limit_s = self._timeout if timeout is None else timeout
        process = await session.run(
            command,
            stderr=STDOUT,
            timeout_s=limit_s or None,
            max_output_bytes=self._max_output_bytes,
        )
        return _response(process.result(), limit_s)

    # Files.

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files; an error is reported per file.

        Args:
            files: absolute paths and contents.

        """
        return self._session.call(lambda session: _upload(session, files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, as ``upload_files()``.

        Args:
            files: absolute paths and contents.

        """
        return await _upload(await self._session.opened(), files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files; an error is reported per file.

        Args:
            paths: absolute paths.

        """
        return self._session.call(lambda session: _download(session, paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files, as ``download_files()``.

        Args:
            paths: absolute paths.

        """
        return await _download(await self._session.opened(), paths)


async def _upload(session: Session, files: Sequence[tuple[str, bytes]]) -> list[FileUploadResponse]:
    found = []
    for path, data in files:
        error, _ = await _attempt(path, _files.write(session, path, data))
        found.append(FileUploadResponse(path=path, error=error))
    return found


async def _download(session: Session, paths: Sequence[str]) -> list[FileDownloadResponse]:
    found = []
    for path in paths:
        error, content = await _attempt(path, _files.read(session, path))
        found.append(FileDownloadResponse(path=path, content=content, error=error))
    return found


def _response(result: Any, limit_s: float) -> ExecuteResponse:
    output, code = result.stdout, result.returncode
    if result.termination_reason == "timeout":
        code = TIMEOUT_EXIT_CODE
        output = f"{output}\nThe command was ended after {limit_s} seconds."
    elif result.termination_reason == "oom":
        output = f"{output}\nThe command was ended: out of memory."
    return ExecuteResponse(output=output, exit_code=code, truncated=result.truncated)


async def _attempt(path: str, call: Coroutine[Any, Any, Any]) -> tuple[Any, Any]:
    """Await a file operation; return the standard name of its error, or its result."""
    if not path.startswith("/"):
        call.close()
        return "invalid_path", None
    try:
        return None, await call
    except (FileNotFoundError, NotADirectoryError):
        return "file_not_found", None
    except IsADirectoryError:
        return "is_directory", None
    except PermissionError:
        return "permission_denied", None
    except OSError as exc:
        return str(exc), None


# Deep Agents Code finds the provider by an entry point. It needs a package that deepagents does
# not, so the class is made at its first use.


def __getattr__(name: str) -> Any:
    if name != "UnionSandboxProvider":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _provider_class()
    return value


def _provider_class() -> type:
    require_framework("deepagents_code", extra="deepagents-code")
    from deepagents_code.integrations.sandbox_provider import (
        SandboxNotFoundError,
        SandboxProvider,
        SandboxProviderMetadata,
    )

    from union.sandbox import on_device
    from union.sandbox.errors import SessionClosedError

    class UnionSandboxProvider(SandboxProvider):
        """Sandboxes for ``dcode --sandbox union``."""

        @property
        def metadata(self) -> SandboxProviderMetadata:
            """The name and the abilities of this provider."""
            return SandboxProviderMetadata(
                name="union", working_dir=WORK_DIR, supports_sandbox_id=True
            )

        def get_or_create(self, *, sandbox_id: str | None = None, **options: Any) -> UnionSandbox:
            """Return the open sandbox with an id of this process, or a new one."""
            if sandbox_id is None:
                box = UnionSandbox(**options)
                _ = box.id  # opens it
                return box
            try:
                found: Session = on_device.attach(sandbox_id)
            except SessionClosedError as exc:
                raise SandboxNotFoundError(str(exc)) from exc
            return UnionSandbox(session=found)

        def delete(self, *, sandbox_id: str, **_: Any) -> None:
            """End a sandbox. Deleting twice is allowed."""
            end(sandbox_id)

    UnionSandboxProvider.__qualname__ = "UnionSandboxProvider"
    return UnionSandboxProvider
