"""Forward bytes between two sockets, including half-closes, and check the client's ClientHellos.

Back-pressure comes from the kernel: a direction reads again only after it has sent the previous
read. It holds one read while its sink is slow, and nothing while it is idle.
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
"""A socket that is always ready must not starve other connections of the event loop."""
_HELLO_TIMEOUT_S: Final = 10.0
_MAX_HELLO_READS: Final = 1024


async def tunnel(
    client: Stream, outbound: OutboundConnection, attempt: Attempt, *, policy: Policy
) -> None:
    """Forward bytes until both sides have ended. The caller closes the streams.

    Raises:
        RefusedError: the client's TLS server name is refused, or its ClientHello is malformed.
        OSError: one of the sides was reset.

    """
    server = outbound.stream
    hellos = ClientHelloTracker()
    attempt.is_tunnel = True
    both = (
        asyncio.create_task(_forward_up(client, outbound, attempt, policy, hellos)),
        asyncio.create_task(_forward_down(server, client, attempt, policy, hellos)),
    )
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _forward_up(
    client: Stream,
    outbound: OutboundConnection,
    attempt: Attempt,
    policy: Policy,
    hellos: ClientHelloTracker,
) -> None:
    server = outbound.stream
    while not hellos.is_over:
        data = await _read_checked(client, hellos, outbound.name, attempt, policy)
        if not data:
            hellos.is_over = True
            break
        await _until_allowed(attempt, policy)
        await server.send(data)
        attempt.bytes_up += len(data)
    # Bytes that were read together with the head precede those still in the socket.
    if rest := client.take_buffered():
        await _until_allowed(attempt, policy)
        await server.send(rest)
        attempt.bytes_up += len(rest)
    async for size in _pump(client, server, attempt, policy):
        attempt.bytes_up += size
    await _until_allowed(attempt, policy)
    server.shutdown_write()


async def _forward_down(
    server: Stream, client: Stream, attempt: Attempt, policy: Policy, hellos: ClientHelloTracker
) -> None:
    # An upstream proxy may have sent the first bytes together with its own response.
    while not hellos.is_over and (data := await server.read_some(_READ_BYTES)):
        await _until_allowed(attempt, policy)
        hellos.feed_server(data)
        await client.send(data)
        attempt.bytes_down += len(data)
    if rest := server.take_buffered():
        await _until_allowed(attempt, policy)
        await client.send(rest)
        attempt.bytes_down += len(rest)
    async for size in _pump(server, client, attempt, policy):
        attempt.bytes_down += size
    await _until_allowed(attempt, policy)
    client.shutdown_write()


async def _until_allowed(attempt: Attempt, policy: Policy) -> None:
    """Wait while forwarding is suspended; raise if the connection was revoked."""
    if policy.is_suspended:
        await policy.until_resumed()
    attempt.check_not_revoked()


async def _pump(
    source: Stream, sink: Stream, attempt: Attempt, policy: Policy
) -> AsyncIterator[int]:
    """Forward bytes until ``source`` ends; yield the size of each read."""
    loop = asyncio.get_running_loop()
    count = 0
    while data := await loop.sock_recv(source.sock, _READ_BYTES):
        if policy.is_suspended:
            await policy.until_resumed()
        attempt.check_not_revoked()
        await loop.sock_sendall(sink.sock, data)
        yield len(data)
        count += 1
        if count % _READS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _read_checked(
    client: Stream,
    hellos: ClientHelloTracker,
    name: str | None,
    attempt: Attempt,
    policy: Policy,
) -> bytes:
    """Return the next bytes to forward; a ClientHello is held back until it is checked."""
    data = await client.read_some()
    if not data:
        return data
    try:
        found = hellos.feed(data)
        if hellos.is_waiting:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                reads = 1
                while hellos.is_waiting:
                    more = await client.read_some()
                    reads += 1
                    if not more or reads > _MAX_HELLO_READS:
                        raise TlsFormatError("it ends early or arrives in too many reads")
                    data += more
                    found += hellos.feed(more)
    except TimeoutError:
        raise RefusedError(
            _malformed(f"the TLS ClientHello did not arrive within {_HELLO_TIMEOUT_S:g} s")
        ) from None
    except TlsFormatError as exc:
        raise RefusedError(_malformed(f"the TLS ClientHello is malformed: {exc}")) from exc
    for server_name in found:
        verdict = policy.decide_server_name(server_name, attempt.port, name=name)
        if not verdict.allowed:
            raise RefusedError(verdict)
        attempt.server_names += (server_name,)
    return data


def _malformed(reason: str) -> Verdict:
    return Verdict(allowed=False, rule="syntax", reason=reason)
