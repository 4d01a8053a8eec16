"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_thread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Runs a blocking call in a thread, and comes back only when the thread is done with it.

    Also when cancelled: what comes after may close the files that the thread was using.
    """
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, functools.partial(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue  # raised below, once
        if not work.cancelled():
            work.exception()  # looked at, or the loop would report it as forgotten
        raise
