"""ProcessStdin: the writing end of a command's stdin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from union.sandbox._session.own_loop import deliver, in_own_loop
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from union.sandbox._session.transport import Run

__all__ = ["ProcessStdin"]


class ProcessStdin:
    """The writing end of a command's stdin."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._closed = False
        self._own_loop = asyncio.get_running_loop()

    def _attach(self, run: Run) -> None:
        self._run = run

    def write(self, data: bytes) -> None:
        """Queue bytes and start to send them; ``drain()`` waits until they are sent.

        Args:
            data: bytes to append to the command's stdin.

        Raises:
            SandboxUsageError: stdin is closed, or ``data`` is not bytes-like.

        """
        if self._closed or self._run is None:
            raise SandboxUsageError("stdin is closed", argument="data")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SandboxUsageError(
                f"stdin accepts bytes, not {type(data).__name__}", argument="data"
            )
        deliver(self._own_loop, self._run.feed_stdin, bytes(data))

    @in_own_loop
    async def drain(self) -> None:
        """Wait until the command's pipe has accepted everything that was written.

        Raises:
            BrokenPipeError: the command has closed its stdin or ended.

        """
        if self._run is not None:
            await self._run.drain_stdin()

    def close(self) -> None:
        """Send end-of-file after everything that was written."""
        self._closed = True
        if self._run is not None:
            deliver(self._own_loop, self._run.close_stdin)
