"""The protocols between a session and the transport that runs its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.events import Event
    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["Files", "Run", "Sink", "Transport"]


class Sink(Protocol):
    """Receives the events and output of one command. All calls come from the event loop."""

    def event(self, event: Event) -> None:
        """Receive ``Started`` at most once, then one ``Exited`` or ``Failed``."""
        ...

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        """Receive bytes of stdout (1) or stderr (2); False pauses the stream until ``resume``.

        A view refers to bytes that do not change; keeping it keeps the whole buffer in memory.
        """
        ...

    def end_of_output(self, fd: int) -> None: ...

    def decision(self, decision: Decision) -> None:
        """Receive the decision about one connection or name lookup."""

    def request(self, request: HttpRequest) -> None:
        """Receive the record of one request to the host of an ``Http`` entry."""


class Run(Protocol):
    """One command in flight."""

    @property
    def isolation(self) -> Isolation:
        """The isolation layers of this command."""
        ...

    def resume(self, fd: int) -> None:
        """Resume a stream whose ``output`` returned False."""

    def signal(self, signum: int) -> None:
        """Send a signal to the whole process tree."""

    def end(self, cause: str) -> None:
        """End the whole process tree; ``cause`` becomes the termination reason."""

    def resize(self, rows: int, cols: int) -> None:
        """Change the window size of the command's terminal."""

    def feed_stdin(self, data: bytes) -> None:
        """Queue bytes for the command's stdin."""

    async def drain_stdin(self) -> None:
        """Wait until the pipe accepted all queued bytes; BrokenPipeError if it has no reader."""

    def close_stdin(self) -> None:
        """Send end-of-file after the queued bytes."""


class Files(Protocol):
    """Files that can be copied from and to. No operation follows a link in any component.

    ``work_path`` checks every path; errors are those of ``_core/file_errors``.
    """

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        """Write a file atomically and create its parent directories."""
        ...

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Return the content of a regular file; raise if it is larger than ``max_bytes``."""
        ...

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        """Like ``put``, from chunks as they arrive; holds one at a time.

        The file appears when the last chunk is written. If ``chunks`` raises or the call is
        cancelled, nothing remains, not even a partial file. Exceptions of ``chunks`` propagate
        unchanged.
        """
        ...

    def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Like ``get``, in chunks that are not empty; errors are raised at the first or later.

        A file that grows beyond ``max_bytes`` while it is read raises. ``aclose()`` ends the read
        early and returns when all resources are released.
        """
        ...

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return the entries of a directory, sorted by path; raise if there are too many."""
        ...

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        """Create a directory; ``exist_ok`` accepts an existing directory, but no other file."""


class Transport(Files, Protocol):
    """Runs commands and transfers files, on this machine or another."""

    @property
    def is_known(self) -> bool:
        """Whether ``work_dir`` and ``isolation`` are available; a server must be reached first."""
        ...

    @property
    def work_dir(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    @property
    def shell(self) -> str:
        """The path, inside the sandbox, of the shell that runs commands given as text."""
        ...

    async def open(self) -> None: ...

    async def start(self, spec: RunSpec, sink: Sink) -> Run:
        """Start one command. Delivers ``Started`` or ``Failed`` before it returns."""
        ...

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]: ...

    async def stat(self, path: str) -> FileInfo:
        """Return the description of a path, without following links. The work dir is ``"."``."""
        ...

    async def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link (not its target) or a directory.

        A directory that is not empty needs ``recursive``; the work dir itself is rejected.
        """

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of a session that keeps them between commands."""
        ...

    async def stop_process(self, pid: int) -> bool:
        """End one of them; return whether it existed."""
        ...

    async def aclose(self) -> None:
        """End all commands and return when they are gone."""
