"""Hold back the commands and file calls of a session for a moment."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["StartGate"]


class StartGate:
    """Entered by ``async with`` around each call that it may hold back."""

    __slots__ = ("_opened", "_passed", "_users")

    def __init__(self) -> None:
        self._users = 0
        self._opened: asyncio.Event | None = None
        """Set when the gate opens again; None while it is open."""
        self._passed: asyncio.Event | None = None
        """Set when the last call that had entered has left."""

    @property
    def is_closed(self) -> bool:
        return self._opened is not None

    async def __aenter__(self) -> None:
        if not self.enter():
            await self.wait()

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> bool:
        """Enter an open gate without a turn of the event loop; False if it is closed."""
        if self._opened is not None:
            return False
        self._users += 1
        return True

    async def wait(self) -> None:
        """Enter as soon as the gate is open."""
        while self._opened is not None:
            await self._opened.wait()
        self._users += 1

    def leave(self) -> None:
        """Leave the gate."""
        self._users -= 1
        if self._users == 0 and self._passed is not None:
            self._passed.set()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate; begins when no call is under way. Not for two callers at once."""
        self._opened, self._passed = opened, passed = asyncio.Event(), asyncio.Event()
        try:
            if self._users:
                await passed.wait()
            yield
        finally:
            self._opened = self._passed = None
            opened.set()
