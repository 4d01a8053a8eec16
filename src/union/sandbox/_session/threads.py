"""Work beside the event loop that has to be finished, whatever becomes of who waits for it."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_thread", "until_done"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Comes back only when all of them are done, also when cancelled meanwhile.

    When ``asyncio.run`` ends it cancels every task, those that clean up too, and waits for them.
    """
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            continue


async def in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Runs a blocking call in a thread, and comes back only when the thread is done with it.

    Also when cancelled: what comes after may close the files that the thread was using.
    """
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, functools.partial(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await until_done(work)
        if not work.cancelled():
            work.exception()  # looked at, or the loop would report it as forgotten
        raise
