"""The body of an upload: pieces with their sizes, and at the end whether that was all.

The caller's pieces may end in an error, or nobody may want them any more. Then the server is told,
so that it has let go of the file before the caller goes on; a connection that is merely cut would
leave it to find out by itself, a moment later.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._files.writer import as_byte_view
from union.sandbox._wire.frames import to_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

__all__ = ["LAST", "PIECE", "Upload", "finished"]

PIECE: Final = struct.Struct(">I")
"""The size of a piece, before it."""
LAST: Final = 0xFFFFFFFF
"""In place of a size: a JSON object follows, and is the end."""
_MOST: Final = 256 * 1024


class Upload:
    """Reads the caller's pieces, until they end or are given up."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self._reading: asyncio.Task[memoryview | None] | None = None
        self._given_up = False
        self.fault: BaseException | None = None
        """What the caller's pieces raised."""
        self.taken = 0
        """How many pieces the connection has taken."""
        self.waits_for_caller = False

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._given_up = True
        if self._reading is not None:
            self._reading.cancel()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, always whole: what went wrong is its last word."""
        chunks = aiter(self._chunks)
        while not self._given_up:
            self._reading = asyncio.ensure_future(_next(chunks))
            self.waits_for_caller = True
            await asyncio.wait({self._reading})
            self.waits_for_caller = False
            if self._reading.cancelled():
                self._given_up = True
                break
            self.fault = self._reading.exception()
            if self.fault is not None:
                break
            view = self._reading.result()
            if view is None:
                yield PIECE.pack(LAST) + to_json({"done": True})
                return
            for at in range(0, len(view), _MOST):
                piece = view[at : at + _MOST]
                yield PIECE.pack(len(piece)) + piece
                self.taken += 1
        yield PIECE.pack(LAST) + to_json({"given_up": True})


async def _next(chunks: AsyncIterator[bytes]) -> memoryview | None:
    chunk = await anext(chunks, None)
    return None if chunk is None else as_byte_view(chunk)


async def finished(task: asyncio.Task[Any], *, within_s: float) -> None:
    """Waits for a task whose outcome does not matter any more; also when cancelled again."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not task.done() and loop.time() < end:
        try:
            await asyncio.wait({task}, timeout=end - loop.time())
        except asyncio.CancelledError:
            continue  # the caller is being cancelled already
    if not task.done():
        task.cancel()
        return
    if not task.cancelled():
        task.exception()  # looked at, or the loop would report it as forgotten
