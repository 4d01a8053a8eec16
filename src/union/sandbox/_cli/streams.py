"""Between the descriptors of ``sbx`` and a command: bytes in, bytes out, nothing held back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from union.sandbox._session.process import ProcessStdin

__all__ = ["forward", "has_input", "type_in"]

_CHUNK: Final = 64 * 1024


async def _apart(function: Callable[..., Any], *args: object) -> Any:
    """Calls in a thread that the program does not wait for when it ends.

    A terminal that was stopped, or a pipe that nobody reads, blocks for as long as it likes.
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
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await done


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def forward(chunks: AsyncIterator[bytes], fd: int) -> None:
    """Passes output on as it comes; BrokenPipeError when nobody takes it."""
    async for data in chunks:
        await _apart(_write_all, fd, data)


def has_input(fd: int) -> bool:
    """Whether reading is ours: a program in the background that reads its terminal is stopped."""
    try:
        return not os.isatty(fd) or os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # a terminal, but not the one that controls us
        return True


async def type_in(fd: int, stdin: ProcessStdin) -> None:
    """Passes input on until it ends, or the command does not take it any more."""
    try:
        while data := await _apart(os.read, fd, _CHUNK):
            stdin.write(data)
            await stdin.drain()
    except OSError:
        # The command stopped reading, or our own input went away: for it, both are the end.
        pass
    stdin.close()
