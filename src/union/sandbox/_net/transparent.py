"""The transparent frontend: it receives every TCP connection that a program makes.

The kernel redirects the connection (see ``_codecs/netlink.py``) and keeps its original destination.
That is either a synthetic address of the stub resolver or an address that the program chose.
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

    from union.sandbox._net.connection import Connection
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.synthetic import SyntheticNames

    Destination = Callable[[socket.socket], tuple[Address, int]]

__all__ = ["TransparentFrontend", "original_destination"]

_SO_ORIGINAL_DST: Final = 80
_SOL_IPV6: Final = 41


def original_destination(sock: socket.socket) -> tuple[Address, int]:
    """Return the original destination of a redirected connection.

    Raises:
        OSError: the connection was not redirected.

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
        # The program connected to the listener itself: there is no other destination.
        raise OSError("the connection was made to the listener itself")
    return address, port


class TransparentFrontend:
    """Serve redirected connections.

    Args:
        names: maps synthetic addresses back to names.
        destination: returns the original destination of a socket.

    """

    name: Final = "tcp"

    def __init__(
        self, names: SyntheticNames, *, destination: Destination = original_destination
    ) -> None:
        self._names = names
        self._destination = destination

    def destination_of(self, sock: socket.socket) -> tuple[str, int]:
        """Return the original destination, by name where the address is synthetic."""
        try:
            address, port = self._destination(sock)
        except OSError:
            return "", 0
        return self._names.name(address) or str(address), port

    async def serve(self, connection: Connection) -> None:
        """Check, dial and relay one connection. A refusal resets it."""
        try:
            address, port = self._destination(connection.stream.sock)
        except OSError:
            attempt = Attempt(frontend="tcp", host="", port=0)
            attempt.verdict = Verdict(
                allowed=False, rule="syntax", reason="connection without an original destination"
            )
            connection.begin_attempt(attempt)
            connection.stream.abort()
            return
        host = self._names.name(address) or str(address)
        attempt = connection.begin_attempt(Attempt(frontend="tcp", host=host, port=port))
        connection.request_received()
        bound = connection.policy.binding(host, port)
        if bound is not None:
            await connection.intercept(attempt, bound).serve()
            return
        outbound = await connection.dial(attempt)
        await tunnel(connection.stream, outbound, attempt, policy=connection.policy)
