"""The seam between a session and whatever runs its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.events import Event
    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision

__all__ = ["Files", "Run", "Sink", "Transport"]


class Sink(Protocol):
    """Where a transport delivers what a command does. All calls come from the event loop."""

    def event(self, event: Event) -> None: ...

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        """Takes bytes of stdout (1) or stderr (2). False: stop reading until ``resume``.

        A view is of bytes that nobody will change; whoever keeps it keeps them all.
        """
        ...

    def end_of_output(self, fd: int) -> None: ...

    def decision(self, decision: Decision) -> None:
        """Takes what was decided about one connection or look-up."""


class Run(Protocol):
    """One command in flight."""

    @property
    def isolation(self) -> Isolation:
        """What is enforced for this one command."""
        ...

    def resume(self, fd: int) -> None:
        """There is room again for a stream whose ``output`` had answered False."""

    def signal(self, signum: int) -> None:
        """Sends a signal to the whole process tree."""

    def end(self, cause: str) -> None:
        """Ends the whole tree; ``cause`` becomes the reason."""

    def resize(self, rows: int, cols: int) -> None:
        """Changes the window of a command that has a terminal."""

    def feed_stdin(self, data: bytes) -> None:
        """Queues bytes for the command's stdin."""

    async def drain_stdin(self) -> None:
        """Returns when the pipe took what was queued; BrokenPipeError when nobody reads it."""

    def close_stdin(self) -> None:
        """End of file, after what was queued."""


class Files(Protocol):
    """What trees are copied from and to. ``put``, ``get`` and the rest follow no link anywhere.

    Every path is checked by ``work_path``; errors are those of ``_core/file_errors``.
    """

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        """Makes a file with this content, atomically, and the directories it needs."""
        ...

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """The content of a regular file; larger than ``max_bytes`` is an error, not a cut."""
        ...

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        """Like ``put``, from pieces as they come; holds one at a time.

        The name is given when the last piece is written. If ``chunks`` raises, or the call is
        cancelled, nothing is left: not the file, not a part of it. What ``chunks`` raises comes
        out as it is.
        """
        ...

    def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Like ``get``, in pieces that are not empty; errors come with the first, or later.

        A file that grows past ``max_bytes`` while it is read is an error then. ``aclose()`` ends
        the read early and returns when everything is let go.
        """
        ...

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """What is in a directory, sorted by path; too many entries are an error, not a cut."""
        ...

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        """Makes a directory; ``exist_ok`` accepts one that is there, but nothing else."""


class Transport(Files, Protocol):
    """Runs commands and moves files, on this machine or another."""

    @property
    def is_known(self) -> bool:
        """Whether ``work_dir`` and ``isolation`` can be told: a server must be reached first."""
        ...

    @property
    def work_dir(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    async def open(self) -> None: ...

    async def start(self, spec: RunSpec, sink: Sink) -> Run:
        """Starts one command. Delivers ``Started`` or ``Failed`` before it returns."""
        ...

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]: ...

    async def stat(self, path: str) -> FileInfo:
        """What has this name; a link is described itself. The work dir is ``"."``."""
        ...

    async def remove(self, path: str, *, recursive: bool) -> None:
        """Removes a file, a link (not what it points to) or a directory.

        A directory that is not empty needs ``recursive``; the work dir itself is refused.
        """

    async def aclose(self) -> None:
        """Ends everything that was started and returns when it is gone."""
