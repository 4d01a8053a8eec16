"""The listening sockets of the server that runs a sandbox, which no sandbox may reach.

A list of the host's addresses is out of date as soon as the host gains one, and does not cover
local ranges. So the kernel is asked about each destination when it is dialled: is its route local?
"""

from __future__ import annotations

import logging
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.netlink import NETLINK_ROUTE, encode_route_query, is_local_route
from union.sandbox._policy.addresses import canonical, embedded_ipv4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from union.sandbox._policy.addresses import Address

__all__ = ["OwnServer", "is_local"]

_LOGGER: Final = logging.getLogger("union.sandbox.network")
_REPLY_BYTES: Final = 16 * 1024
_TIMEOUT_S: Final = 1.0


def is_local(address: Address) -> bool:
    """Return whether a connection to ``address`` would be delivered to this host.

    Raises:
        OSError: the kernel's routing table cannot be asked.

    """
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError("this system has no netlink sockets")
    with socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_ROUTE) as sock:
        # The kernel answers before send() returns; the timeout is for a kernel that does not.
        sock.settimeout(_TIMEOUT_S)
        sock.bind((0, 0))
        sock.send(encode_route_query(address.version, address.packed))
        return is_local_route(sock.recv(_REPLY_BYTES))


class OwnServer:
    """Where the server listens.

    Args:
        listening: addresses and ports of its TCP sockets.
        ask: whether an address is local; raises OSError where that cannot be found out.

    """

    def __init__(
        self,
        listening: Iterable[tuple[str, int]],
        *,
        ask: Callable[[Address], bool] = is_local,
    ) -> None:
        self._listening = tuple(
            (canonical(ip_address(host.partition("%")[0])), port) for host, port in listening
        )
        self._ports = frozenset(port for _, port in self._listening)
        self._ask = ask

    @property
    def listens_on_tcp(self) -> bool:
        """Whether there is a port that a sandbox could dial."""
        return bool(self._ports)

    def refusal(self, address: Address, port: int) -> str:
        """Return why a connection there is refused; empty if it does not lead to the server."""
        if port not in self._ports:
            return ""
        address = canonical(address)
        inner = embedded_ipv4(address)
        for candidate in (address, *(() if inner is None else (inner,))):
            if self._leads_here(candidate, port):
                return f"{address} port {port} is the server that runs this sandbox"
        return ""

    def _leads_here(self, address: Address, port: int) -> bool:
        bound = [host for host, own in self._listening if own == port]
        if address in bound or address.is_unspecified:
            return True
        if not any(host.is_unspecified or host.is_loopback for host in bound):
            return False
        if address.is_loopback:
            return True
        if not any(host.is_unspecified for host in bound):
            return False
        try:
            return self._ask(address)
        except OSError as exc:
            # Only the server's own ports come this far, so a refusal costs next to nothing.
            _LOGGER.warning("cannot ask the kernel whether %s is local: %s", address, exc)
            return True
