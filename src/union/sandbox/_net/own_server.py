"""The listening sockets of the server that runs a sandbox. No sandbox may connect to them.

A list of the host's addresses is outdated as soon as the host gains one, and does not cover local
ranges. So the kernel's routing table is queried for each destination at the time of dialling.
"""

from __future__ import annotations

import errno
import logging
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.netlink import NETLINK_ROUTE, encode_route_query, is_local_route
from union.sandbox._policy.addresses import canonical, embedded_ipv4
from union.sandbox._system import IS_LINUX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from union.sandbox._policy.addresses import Address

__all__ = ["OwnServer", "is_local", "is_own_address"]

_LOGGER: Final = logging.getLogger("union.sandbox.network")
_REPLY_BYTES: Final = 16 * 1024
_TIMEOUT_S: Final = 1.0
_DISCARD_PORT: Final = 9
_UNREACHABLE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL})


def is_local(address: Address) -> bool:
    """Return whether a connection to ``address`` would be delivered to this host.

    Raises:
        OSError: the kernel's routing table cannot be queried.

    """
    if not IS_LINUX:
        return address.is_loopback or is_own_address(address)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as sock:
        # The kernel replies before send() returns; the timeout bounds a kernel that does not.
        sock.settimeout(_TIMEOUT_S)
        sock.bind((0, 0))
        sock.send(encode_route_query(address.version, address.packed))
        return is_local_route(sock.recv(_REPLY_BYTES))


def is_own_address(address: Address) -> bool:
    """Return whether this host has ``address``, on a system without netlink sockets.

    The kernel sends from the very address to which it delivers locally. No packet is sent.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((str(address), _DISCARD_PORT))
        except OSError as exc:
            if exc.errno in _UNREACHABLE:
                return False
            raise
        return ip_address(sock.getsockname()[0].partition("%")[0]) == address


class OwnServer:
    """The TCP addresses on which the server listens.

    Args:
        listening: addresses and ports of its TCP sockets; empty without any.
        is_local: returns whether an address is local; raises OSError if that is unknown.
            Default: query the kernel.

    """

    def __init__(
        self,
        listening: Iterable[tuple[str, int]],
        *,
        is_local: Callable[[Address], bool] = is_local,
    ) -> None:
        self._listening = tuple(
            (canonical(ip_address(host.partition("%")[0])), port) for host, port in listening
        )
        self._ports = frozenset(port for _, port in self._listening)
        self._is_local = is_local

    @property
    def listens_on_tcp(self) -> bool:
        """Whether the server has a TCP port."""
        return bool(self._ports)

    def refusal(self, address: Address, port: int) -> str:
        """Return why a connection is refused; empty if it does not reach the server."""
        if port not in self._ports:
            return ""
        address = canonical(address)
        inner = embedded_ipv4(address)
        for candidate in (address, *(() if inner is None else (inner,))):
            if self._reaches_server(candidate, port):
                return f"{address} port {port} is the server that runs this sandbox"
        return ""

    def _reaches_server(self, address: Address, port: int) -> bool:
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
            return self._is_local(address)
        except OSError as exc:
            # Only the server's own ports get here, so a refusal affects no other destination.
            _LOGGER.warning("cannot query the kernel whether %s is local: %s", address, exc)
            return True
