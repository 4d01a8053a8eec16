"""The allow-listed network of a run without a network namespace: each connection is handed over.

The command's filter notifies its runner of each ``connect()``. The runner sends the destination
here and blocks the call. The policy decides about it. An allowed one gets a TCP connection to this
process over loopback, which takes the place of the command's socket, and the egress of the run
serves the other end like a redirected connection.
"""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from union.sandbox._policy.addresses import canonical, parse_address
from union.sandbox.on_device._network import DNS_PORT, HTTP_PORT, SOCKS_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._linux.run import LocalRun
    from union.sandbox._net.egress import Egress
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.decision import FrontendName

    OpenEgress = Callable[[Callable[[socket.socket], tuple[Address, int]]], Egress]

__all__ = ["MediatedNetwork", "loopback_pair", "serve_mediated"]

_LOOPBACK: Final = "127.0.0.1"
_ACCEPT_TIMEOUT_S: Final = 0.5
_BACKLOG: Final = 16
_RESOLV_CONF: Final = Path("/etc/resolv.conf")


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a TCP connection inside this process.

    Another process may connect to the listener first; only our own connection is accepted.

    Raises:
        OSError: it could not be made.

    """
    with socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG) as listener:
        listener.settimeout(_ACCEPT_TIMEOUT_S)
        near = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            near.setblocking(False)
            near.connect_ex(listener.getsockname())
            own = near.getsockname()
            for _ in range(_BACKLOG):
                far, peer = listener.accept()
                if peer == own:
                    near.setblocking(True)
                    return near, far
                far.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the listener was taken by others")
        except BaseException:
            near.close()
            raise


class MediatedNetwork:
    """Answer the connection requests of one run.

    Args:
        open_egress: creates the egress of the run; it gets the function that returns the
            destination of one of its connections.

    """

    def __init__(self, open_egress: OpenEgress) -> None:
        self._destinations: WeakKeyDictionary[socket.socket, tuple[Address, int]] = (
            WeakKeyDictionary()
        )
        self._resolvers = _resolvers()
        self._egress = open_egress(self._destinations.__getitem__)
        self.aclose = self._egress.aclose

    def connect(self, family: int, raw: bytes, port: int) -> socket.socket:
        """Return a connected socket for the command; the caller closes it.

        Args:
            family: the address family of the destination.
            raw: its address, in the first bytes.
            port: its port.

        Raises:
            OSError: the destination is refused, or no connection could be made.

        """
        address = _address(family, raw)
        near, far = loopback_pair()
        try:
            self._destinations[far] = (address, port)
            if not self._egress.adopt(far, self._frontend(address, port)):
                raise PermissionError(errno.EACCES, "refused by the network policy")
        except BaseException:
            near.close()
            raise
        return near

    def _frontend(self, address: Address, port: int) -> FrontendName:
        if port == DNS_PORT and (address.is_loopback or address in self._resolvers):
            return "dns"
        if str(address) == _LOOPBACK:
            if port == HTTP_PORT:
                return "http"
            if port == SOCKS_PORT:
                return "socks"
        return "tcp"


def serve_mediated(run: LocalRun, open_egress: OpenEgress) -> None:
    """Answer the connection requests of a run; its egress is opened at the first of them."""

    def connect(family: int, address: bytes, port: int) -> socket.socket:
        network = MediatedNetwork(open_egress)
        run.close_listeners = network.aclose
        run.on_connect = network.connect
        return network.connect(family, address, port)

    run.on_connect = connect


def _address(family: int, raw: bytes) -> Address:
    if family == socket.AF_INET:
        return IPv4Address(raw[:4])
    if family == socket.AF_INET6:
        return canonical(IPv6Address(raw))
    raise OSError(errno.EAFNOSUPPORT, f"address family {family} is not supported")


def _resolvers() -> frozenset[Address]:
    """Return the name servers of this host, which programs inside read from the same file."""
    try:
        lines = _RESOLV_CONF.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    words = [line.split() for line in lines]
    found = (
        parse_address(w[1].partition("%")[0]) for w in words if w[:1] == ["nameserver"] and w[1:]
    )
    return frozenset(address for address in found if address is not None)
