"""Resolve names and connect to the first reachable address (RFC 8305). Applies no policy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._net.host_lookup import look_up
from union.sandbox._session.threads import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._net.budget import Share
    from union.sandbox._policy.addresses import Address

__all__ = ["HostResolver", "Resolver", "connect_any"]

_ATTEMPT_DELAY_S: Final = 0.25


class Resolver(Protocol):
    """Resolves names to addresses."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Return the addresses of ``name``; raise OSError if there are none."""
        ...


class HostResolver:
    """Resolve names with the host's resolver, including its hosts file.

    Args:
        key: identifies the session. Each key gets a share of the lookup threads, so that slow
            lookups of one session delay neither other sessions nor file operations.

    """

    def __init__(self, key: object) -> None:
        self._key = key

    async def resolve(self, name: str) -> Sequence[str]:
        """Return all addresses of ``name`` in the host's order of preference.

        Raises:
            OSError: there is none, or too many lookups of the session are queued.

        """
        found = await names.run(self._key, look_up, name)
        return [str(info[4][0]) for info in found]


async def connect_any(
    addresses: Sequence[Address], port: int, *, share: Share | None = None
) -> tuple[socket.socket, Address]:
    """Connect to the first address that accepts, starting a new attempt every 0.25 s.

    The caller has reserved a file descriptor for one attempt. Each further parallel attempt
    acquires one from ``share``; if none is left, it starts when the previous attempt has failed.

    Raises:
        OSError: no address accepted; this is the last failure.

    """
    waiting = _interleave_families(addresses)
    running: dict[asyncio.Task[socket.socket], Address] = {}
    extra = 0
    failure: OSError = OSError("no address to connect to")
    try:
        while waiting or running:
            can_start = bool(waiting) and (not running or share is None or share.acquire(1))
            if can_start:
                if running and share is not None:
                    extra += 1
                address = waiting.pop(0)
                running[asyncio.create_task(_connect(address, port))] = address
            done, _ = await asyncio.wait(
                running,
                timeout=_ATTEMPT_DELAY_S if waiting and can_start else None,
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
        sock = socket.socket(family, socket.SOCK_STREAM)
        on_failure.callback(sock.close)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        on_failure.pop_all()
        return sock


def _interleave_families(addresses: Sequence[Address]) -> list[Address]:
    """Alternate between IPv4 and IPv6, starting with the first family: one may be unreachable."""
    if not addresses:
        return []
    first = [a for a in addresses if a.version == addresses[0].version]
    other = [a for a in addresses if a.version != addresses[0].version]
    ordered: list[Address] = []
    for position in range(max(len(first), len(other))):
        ordered += first[position : position + 1] + other[position : position + 1]
    return ordered
