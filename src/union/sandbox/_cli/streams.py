"""Forward bytes between the descriptors of ``sbx`` and a command, without buffering."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from union.sandbox._session.stdin import ProcessStdin

__all__ = ["forward", "has_input", "type_in"]

_CHUNK_BYTES: Final = 64 * 1024


async def _in_thread(function: Callable[..., Any], *args: object) -> Any:
    """Run a call in a daemon thread, so that a blocked call does not delay the exit.

    A stopped terminal or a pipe without a reader blocks indefinitely.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except OSError as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended and no caller waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await done


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def forward(chunks: AsyncIterator[bytes], fd: int) -> None:
    """Write chunks to ``fd`` as they arrive; raise BrokenPipeError if it has no reader."""
    async for data in chunks:
        await _in_thread(_write_all, fd, data)


def has_input(fd: int) -> bool:
    """Return whether ``fd`` may be read: a background job that reads its terminal is stopped."""
    try:
        return not os.isatty(fd) or os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # a terminal, but not our controlling one
        return True


async def type_in(fd: int, stdin: ProcessStdin) -> None:
    """Forward input until it ends or the command closes its stdin."""
    try:
        while data := await _in_thread(os.read, fd, _CHUNK_BYTES):
            stdin.write(data)
            await stdin.drain()
    except OSError:
        # The command stopped reading, or our own input failed. Both end the input.
        pass
    stdin.close()
