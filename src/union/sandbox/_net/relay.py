"""Two sockets, bytes both ways, ends passed on, and a look at the first bytes.

Back-pressure is the kernel's: nothing is read from one side before the last piece has gone to the
other, so a run holds one piece per direction whatever the program does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from union.sandbox._core.hosts import Verdict, decide_server_name
from union.sandbox._core.tls import TlsFormatError, looks_like_tls, read_hello
from union.sandbox._net.decide import RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union.sandbox._core.hosts import NetworkRules
    from union.sandbox._net.decide import Connected
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream

__all__ = ["tunnel"]

_PIECE: Final = 64 * 1024
_LARGE_PIECE: Final = 1024 * 1024
"""Once a whole piece has come at once; measured twice as fast as small ones for bulk."""
_PIECES_PER_TURN: Final = 16
"""A socket that is always ready must not keep the loop from everybody else."""
_HELLO_TIMEOUT_S: Final = 10.0
_MOST_READS: Final = 1024


async def tunnel(
    client: Stream, connected: Connected, attempt: Attempt, *, rules: NetworkRules
) -> None:
    """Carry bytes until both sides have ended. The streams stay the caller's to close.

    Raises:
        RefusedError: the client began TLS with a server that it may not reach.
        OSError: one of the sides was reset.

    """
    server = connected.stream
    both = (
        asyncio.create_task(_up(client, connected, attempt, rules)),
        asyncio.create_task(_down(server, client, attempt)),
    )
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _up(client: Stream, connected: Connected, attempt: Attempt, rules: NetworkRules) -> None:
    first = await client.some()
    if looks_like_tls(first):
        first = await _greeting(client, first, connected.name, attempt.port, rules)
    server = connected.stream
    if not first:
        server.end_writing()
        return
    # What was read along with the head comes before what is still in the socket.
    first += client.take_buffered()
    await server.send(first)
    attempt.bytes_up += len(first)
    async for size in _pump(client, server):
        attempt.bytes_up += size
    server.end_writing()


async def _down(server: Stream, client: Stream, attempt: Attempt) -> None:
    # An upstream proxy may have sent the first bytes along with its own answer.
    if early := server.take_buffered():
        await client.send(early)
        attempt.bytes_down += len(early)
    async for size in _pump(server, client):
        attempt.bytes_down += size
    client.end_writing()


async def _pump(source: Stream, sink: Stream) -> AsyncIterator[int]:
    """Carry bytes to the end of ``source``; yields how many went each time."""
    loop = asyncio.get_running_loop()
    # One piece of memory for all of it: a fresh one each time would cost more than the copying.
    piece = memoryview(bytearray(_PIECE))
    pieces = 0
    while size := await loop.sock_recv_into(source.sock, piece):
        await loop.sock_sendall(sink.sock, piece[:size])
        yield size
        if size == len(piece) < _LARGE_PIECE:
            piece = memoryview(bytearray(_LARGE_PIECE))
        pieces += 1
        if pieces % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)


async def _greeting(
    client: Stream, data: bytes, name: str | None, port: int, rules: NetworkRules
) -> bytes:
    """Hold a TLS greeting back until it is whole and the name in it has been judged."""
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            reads = 1
            while (hello := read_hello(data)) is None:
                more = await client.some()
                reads += 1
                if not more or reads > _MOST_READS:
                    raise TlsFormatError("it ends early, or comes in crumbs")
                data += more
    except TimeoutError:
        raise RefusedError(_malformed("the TLS greeting did not arrive in time")) from None
    except TlsFormatError as exc:
        raise RefusedError(_malformed(f"the TLS greeting is malformed: {exc}")) from exc
    if hello.server_name is not None:
        verdict = decide_server_name(rules, hello.server_name, port, name=name)
        if not verdict.allowed:
            raise RefusedError(verdict)
    return data


def _malformed(reason: str) -> Verdict:
    return Verdict(allowed=False, rule="syntax", reason=reason)
