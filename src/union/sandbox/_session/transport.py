"""The seam between a session and whatever runs its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from union.sandbox._core.decision import Decision
    from union.sandbox._core.events import Event
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec

__all__ = ["Run", "Sink", "Transport"]


class Sink(Protocol):
    """Where a transport delivers what a command does. All calls come from the event loop."""

    def event(self, event: Event) -> None: ...

    def output(self, fd: int, data: bytes) -> bool:
        """Takes bytes of stdout (1) or stderr (2). False: stop reading until ``resume``."""
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

    def feed_stdin(self, data: bytes) -> None:
        """Queues bytes for the command's stdin."""

    async def drain_stdin(self) -> None:
        """Returns when the pipe took what was queued; BrokenPipeError when nobody reads it."""

    def close_stdin(self) -> None:
        """End of file, after what was queued."""


class Transport(Protocol):
    """Runs commands and moves files, on this machine or another."""

    @property
    def work_dir(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    async def open(self) -> None: ...

    async def start(self, spec: RunSpec, sink: Sink) -> Run:
        """Starts one command. Delivers ``Started`` or ``Failed`` before it returns."""
        ...

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int: ...

    async def get(self, path: str, *, max_bytes: int) -> bytes: ...

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]: ...

    async def aclose(self) -> None:
        """Ends everything that was started and returns when it is gone."""
