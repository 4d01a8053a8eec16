"""Upload: the caller's pieces are not in use once a failed request has returned."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from union.sandbox.remote._upload import Upload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

WITHIN_S = 10


async def pieces_that_wait(reached: asyncio.Event) -> AsyncGenerator[bytes, None]:
    yield b"first"
    reached.set()
    await asyncio.Event().wait()


async def sender_that_is_cut(body: Upload, reached: asyncio.Event) -> None:
    """Read the body like an HTTP client whose connection drops during the second piece."""

    async def send() -> None:
        async for _ in body.pieces():
            pass

    sending = asyncio.create_task(send())
    await reached.wait()
    sending.cancel()
    await asyncio.wait({sending})


@pytest.mark.parametrize("stops", [True, False])
async def test_pieces_can_be_closed_after_the_request_has_failed(stops):
    reached = asyncio.Event()
    chunks = pieces_that_wait(reached)
    body = Upload(chunks)
    async with asyncio.timeout(WITHIN_S):
        await sender_that_is_cut(body, reached)
        if stops:
            await body.stop(within_s=WITHIN_S)
            await chunks.aclose()
        else:  # The control: without stop() the next piece is still being read.
            with pytest.raises(RuntimeError, match="already running"):
                await chunks.aclose()
            await body.stop(within_s=WITHIN_S)
    assert body.error is None
    with contextlib.suppress(StopAsyncIteration):
        await anext(chunks)
        pytest.fail("the pieces are still open")


async def test_an_error_of_the_piece_that_was_being_read_is_kept():
    reached = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("of the caller") from None

    body = Upload(pieces())
    async with asyncio.timeout(WITHIN_S):
        await sender_that_is_cut(body, reached)
        await body.stop(within_s=WITHIN_S)
    assert isinstance(body.error, KeyError)
