"""The body of an upload: pieces with their sizes, then whether the upload is complete.

If the caller's pieces end in an error, or the call is cancelled, the body ends with a notice of
that. The server has then closed the file before the caller continues; it would notice a dropped
connection only later.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._files.writer import as_byte_view
from union.sandbox._wire.frames import to_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

__all__ = ["LAST", "PIECE", "Upload", "wait_finished"]

PIECE: Final = struct.Struct(">I")
"""The size of a piece, before it."""
LAST: Final = 0xFFFFFFFF
"""In place of a size: a JSON object follows and ends the body."""
_MAX_PIECE: Final = 256 * 1024


class Upload:
    """Reads the caller's pieces until they end, fail or are cancelled."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self._reading: asyncio.Task[memoryview | None] | None = None
        self._is_cancelled = False
        self.error: BaseException | None = None
        """The exception that the caller's pieces raised."""
        self.sent = 0
        """How many pieces the connection has accepted."""
        self.waits_for_caller = False

    def cancel(self) -> None:
        """Stop reading the caller's pieces and end the body as cancelled."""
        self._is_cancelled = True
        if self._reading is not None:
            self._reading.cancel()

    async def stop(self, *, within_s: float) -> None:
        """Stop reading after a failed request; the caller can close its pieces afterwards."""
        self.cancel()
        reading = self._reading
        if reading is None:
            return
        await wait_finished(reading, within_s=within_s)
        if self.error is None and reading.done() and not reading.cancelled():
            self.error = reading.exception()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body, which is always complete: its last part reports the outcome."""
        chunks = aiter(self._chunks)
        while not self._is_cancelled:
            self._reading = asyncio.ensure_future(_next(chunks))
            self.waits_for_caller = True
            await asyncio.wait({self._reading})
            self.waits_for_caller = False
            if self._reading.cancelled():
                self._is_cancelled = True
                break
            self.error = self._reading.exception()
            if self.error is not None:
                break
            view = self._reading.result()
            if view is None:
                yield PIECE.pack(LAST) + to_json({"done": True})
                return
            for at in range(0, len(view), _MAX_PIECE):
                piece = view[at : at + _MAX_PIECE]
                yield PIECE.pack(len(piece)) + piece
                self.sent += 1
        yield PIECE.pack(LAST) + to_json({"given_up": True})


async def _next(chunks: AsyncIterator[bytes]) -> memoryview | None:
    chunk = await anext(chunks, None)
    return None if chunk is None else as_byte_view(chunk)


async def wait_finished(task: asyncio.Task[Any], *, within_s: float) -> None:
    """Wait for a task and ignore its outcome, even if the caller is cancelled again."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not task.done() and loop.time() < end:
        try:
            await asyncio.wait({task}, timeout=end - loop.time())
        except asyncio.CancelledError:
            continue  # The caller is being cancelled already.
    if not task.done():
        task.cancel()
        return
    if not task.cancelled():
        task.exception()  # Retrieve it, or the event loop would log it as never retrieved.
