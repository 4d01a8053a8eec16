"""Calls from other event loops and threads, carried to the loop that a session belongs to.

A session and its processes are used in one event loop. A call from another loop runs there, and its
caller waits in its own loop. Cancelling the caller cancels the call.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from union.sandbox._session.event_loops import no_loop, other_loop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

__all__ = ["HasOwnLoop", "carry", "deliver", "foreign_loop", "in_own_loop", "iterate_in"]

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound="Callable[..., Coroutine[Any, Any, Any]]")
_END: Final = object()


class HasOwnLoop(Protocol):
    """An object that is used in one event loop."""

    @property
    def _own_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop; None before the first use, which decides."""
        ...


def in_own_loop(method: _Method) -> _Method:
    """Make a coroutine method run in the loop of its object, wherever it is called."""

    @functools.wraps(method)
    async def call(self: HasOwnLoop, /, *args: Any, **kwargs: Any) -> Any:
        own = self._own_loop
        if own is None or own is _running():
            return await method(self, *args, **kwargs)
        return await carry(own, lambda: method(self, *args, **kwargs))

    return cast("_Method", call)


def foreign_loop(owner: HasOwnLoop) -> asyncio.AbstractEventLoop | None:
    """Return the loop that a call must be carried to; None if it can be made here.

    For methods that are called often, which ``in_own_loop`` would give one more coroutine.
    """
    own = owner._own_loop  # noqa: SLF001 - of the protocol of this module
    return None if own is None or own is _running() else own


async def carry(
    loop: asyncio.AbstractEventLoop, begin: Callable[[], Coroutine[Any, Any, _T]]
) -> _T:
    """Run the coroutine that ``begin`` returns in another loop, and wait for its result here."""
    _required()
    if not loop.is_running():
        raise other_loop(loop)

    async def call() -> _T:
        return await begin()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))


def iterate_in(
    loop: asyncio.AbstractEventLoop, source: AsyncGenerator[_T, None]
) -> AsyncIterator[_T]:
    """Return the iterator itself in its own loop; in another loop, one that reads it from there."""
    return source if _running() in {None, loop} else _iterate(loop, source)


async def _iterate(
    loop: asyncio.AbstractEventLoop, source: AsyncGenerator[_T, None]
) -> AsyncGenerator[_T, None]:
    async def following() -> Any:
        return await anext(source, _END)

    try:
        while (item := await carry(loop, following)) is not _END:
            yield item
    finally:
        if loop.is_running():
            await carry(loop, source.aclose)


def deliver(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any) -> None:
    """Make a plain call in ``loop``: at once if this is the loop, otherwise soon."""
    if loop.is_closed() or _running() is loop:
        call(*args)
    else:
        loop.call_soon_threadsafe(call, *args)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _required() -> None:
    if _running() is None:
        raise no_loop()
