"""The door that a program does not see: every TCP connection that it makes arrives here.

The kernel redirected it (see ``_codecs/netlink.py``) and still knows where it was meant to go. That
is either an address that our resolver handed out for a name, or an address the program had.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from union.sandbox._net.ledger import Attempt
from union.sandbox._net.relay import tunnel
from union.sandbox._policy.addresses import canonical
from union.sandbox._policy.rules import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._net.egress import Connection
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.synthetic import SyntheticNames

    Destination = Callable[[socket.socket], tuple[Address, int]]

__all__ = ["TransparentFrontend", "original_destination"]

_SO_ORIGINAL_DST: Final = 80
_SOL_IPV6: Final = 41


def original_destination(sock: socket.socket) -> tuple[Address, int]:
    """Ask the kernel where this redirected connection was going.

    Raises:
        OSError: it was not redirected.

    """
    address: Address
    if sock.family == socket.AF_INET:
        raw = sock.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, 16)
        (port,) = struct.unpack_from(">H", raw, 2)
        address = IPv4Address(raw[4:8])
    else:
        raw = sock.getsockopt(_SOL_IPV6, _SO_ORIGINAL_DST, 28)
        (port,) = struct.unpack_from(">H", raw, 2)
        address = canonical(IPv6Address(raw[8:24]))
    host, own_port, *_ = sock.getsockname()
    if (str(address), port) == (host, own_port):
        # Somebody connected to the listener itself: there is nowhere to go from here.
        raise OSError("a connection to the door itself")
    return address, port


class TransparentFrontend:
    """Serves redirected connections."""

    name: Final = "tcp"

    def __init__(
        self, names: SyntheticNames, *, destination: Destination = original_destination
    ) -> None:
        self._names = names
        self._destination = destination

    def destination_of(self, sock: socket.socket) -> tuple[str, int]:
        """Return the destination of a connection that is not served, for its record."""
        try:
            address, port = self._destination(sock)
        except OSError:
            return "", 0
        return self._names.name(address) or str(address), port

    async def serve(self, connection: Connection) -> None:
        """Judge, dial and relay one connection; a refusal is a reset."""
        try:
            address, port = self._destination(connection.stream.sock)
        except OSError:
            attempt = Attempt(frontend="tcp", host="", port=0)
            attempt.verdict = Verdict(
                allowed=False, rule="syntax", reason="a connection without a destination"
            )
            connection.begin_attempt(attempt)
            connection.stream.abort()
            return
        host = self._names.name(address) or str(address)
        attempt = connection.begin_attempt(Attempt(frontend="tcp", host=host, port=port))
        connection.request_received()
        connected = await connection.dial(attempt)
        await tunnel(connection.stream, connected, attempt, policy=connection.policy)
