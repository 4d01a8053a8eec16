"""From a name to addresses, and from addresses to a connection. Judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._session.threads import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._net.budget import Share
    from union.sandbox._policy.addresses import Address

__all__ = ["HostResolver", "Resolver", "connect_any"]

_STAGGER_S: Final = 0.25


class Resolver(Protocol):
    """Where addresses of names come from."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Return the addresses of ``name``; raise OSError where there are none."""
        ...


class HostResolver:
    """The host's own way of resolving names, hosts file included.

    Args:
        key: the session for which names are resolved; each gets a share of the threads, so that
            one session's slow names delay neither another session nor file work.

    """

    def __init__(self, key: object) -> None:
        self._key = key

    async def resolve(self, name: str) -> Sequence[str]:
        """Return every address, in the order that the host prefers.

        Raises:
            OSError: there is none, or the session has too many lookups waiting.

        """
        found = await names.run(self._key, socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
        return [str(info[4][0]) for info in found]


async def connect_any(
    addresses: Sequence[Address], port: int, *, share: Share | None = None
) -> tuple[socket.socket, Address]:
    """Connect to the address that answers first, starting an attempt each quarter of a second.

    The caller has a descriptor for one attempt. Each further one at the same time is taken from
    ``share``; without room there, it waits until the one before has failed.

    Raises:
        OSError: none could be reached; the last failure.

    """
    waiting = _alternating(addresses)
    running: dict[asyncio.Task[socket.socket], Address] = {}
    extra = 0
    failure: OSError = OSError("no address to connect to")
    try:
        while waiting or running:
            has_room = bool(waiting) and (not running or share is None or share.take(1))
            if has_room:
                if running and share is not None:
                    extra += 1
                address = waiting.pop(0)
                running[asyncio.create_task(_connect(address, port))] = address
            done, _ = await asyncio.wait(
                running,
                timeout=_STAGGER_S if waiting and has_room else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                address = running.pop(task)
                if extra and share is not None:
                    extra -= 1
                    share.release(1)
                try:
                    return task.result(), address
                except OSError as exc:
                    failure = exc
        raise failure
    finally:
        if share is not None:
            share.release(extra)
        for task in running:
            task.cancel()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(outcome, socket.socket):
                outcome.close()


async def _connect(address: Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.ExitStack() as on_failure:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        on_failure.callback(sock.close)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        on_failure.pop_all()
        return sock


def _alternating(addresses: Sequence[Address]) -> list[Address]:
    """Order by turns of family, beginning with that of the first: one may be a dead end."""
    if not addresses:
        return []
    first = [a for a in addresses if a.version == addresses[0].version]
    other = [a for a in addresses if a.version != addresses[0].version]
    ordered: list[Address] = []
    for position in range(max(len(first), len(other))):
        ordered += first[position : position + 1] + other[position : position + 1]
    return ordered
