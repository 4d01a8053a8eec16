"""Carry bytes between two sockets, pass ends on, and judge the TLS greetings of the client.

Back-pressure is the kernel's: nothing is read from one side before the last piece has gone to the
other. A direction holds one piece while its sink is slow, and nothing while it is idle.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.client_hello import ClientHelloTracker, TlsFormatError
from union.sandbox._net.dialer import RefusedError
from union.sandbox._policy.rules import Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union.sandbox._net.dialer import OutboundConnection
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.policy import Policy
    from union.sandbox._net.stream import Stream

__all__ = ["tunnel"]

_READ_BYTES: Final = 64 * 1024
_READS_PER_TURN: Final = 16
"""A socket that is always ready must not keep the event loop from other connections."""
_HELLO_TIMEOUT_S: Final = 10.0
_MAX_HELLO_READS: Final = 1024


async def tunnel(
    client: Stream, connected: OutboundConnection, attempt: Attempt, *, policy: Policy
) -> None:
    """Carry bytes until both sides have ended. The streams stay the caller's to close.

    Raises:
        RefusedError: the client began TLS with a server that it may not reach.
        OSError: one of the sides was reset.

    """
    server = connected.stream
    greetings = ClientHelloTracker()
    both = (
        asyncio.create_task(_up(client, connected, attempt, policy, greetings)),
        asyncio.create_task(_down(server, client, attempt, greetings)),
    )
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _up(
    client: Stream,
    connected: OutboundConnection,
    attempt: Attempt,
    policy: Policy,
    greetings: ClientHelloTracker,
) -> None:
    server = connected.stream
    while not greetings.is_over:
        data = await _judged(client, greetings, connected.name, attempt, policy)
        if not data:
            greetings.is_over = True
            break
        attempt.check_not_revoked()
        await server.send(data)
        attempt.bytes_up += len(data)
    # What was read along with the head comes before what is still in the socket.
    if rest := client.take_buffered():
        attempt.check_not_revoked()
        await server.send(rest)
        attempt.bytes_up += len(rest)
    async for size in _pump(client, server, attempt):
        attempt.bytes_up += size
    attempt.check_not_revoked()
    server.shutdown_write()


async def _down(
    server: Stream, client: Stream, attempt: Attempt, greetings: ClientHelloTracker
) -> None:
    # An upstream proxy may have sent the first bytes along with its own answer.
    while not greetings.is_over and (data := await server.read_some(_READ_BYTES)):
        attempt.check_not_revoked()
        greetings.feed_server(data)
        await client.send(data)
        attempt.bytes_down += len(data)
    if rest := server.take_buffered():
        await client.send(rest)
        attempt.bytes_down += len(rest)
    async for size in _pump(server, client, attempt):
        attempt.bytes_down += size
    attempt.check_not_revoked()
    client.shutdown_write()


async def _pump(source: Stream, sink: Stream, attempt: Attempt) -> AsyncIterator[int]:
    """Carry bytes to the end of ``source``; yield how many went each time."""
    loop = asyncio.get_running_loop()
    pieces = 0
    while piece := await loop.sock_recv(source.sock, _READ_BYTES):
        attempt.check_not_revoked()
        await loop.sock_sendall(sink.sock, piece)
        yield len(piece)
        pieces += 1
        if pieces % _READS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _judged(
    client: Stream,
    greetings: ClientHelloTracker,
    name: str | None,
    attempt: Attempt,
    policy: Policy,
) -> bytes:
    """Return the next bytes that may be sent on; a greeting is held back until it is judged."""
    data = await client.read_some()
    if not data:
        return data
    try:
        found = greetings.feed(data)
        if greetings.is_waiting:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                reads = 1
                while greetings.is_waiting:
                    more = await client.read_some()
                    reads += 1
                    if not more or reads > _MAX_HELLO_READS:
                        raise TlsFormatError("it ends early, or comes in too many pieces")
                    data += more
                    found += greetings.feed(more)
    except TimeoutError:
        raise RefusedError(_malformed("the TLS greeting did not arrive in time")) from None
    except TlsFormatError as exc:
        raise RefusedError(_malformed(f"the TLS greeting is malformed: {exc}")) from exc
    for server_name in found:
        verdict = policy.decide_server_name(server_name, attempt.port, name=name)
        if not verdict.allowed:
            raise RefusedError(verdict)
        attempt.server_names += (server_name,)
    return data


def _malformed(reason: str) -> Verdict:
    return Verdict(allowed=False, rule="syntax", reason=reason)
