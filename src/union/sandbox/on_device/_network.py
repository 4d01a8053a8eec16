"""The network of one run: its shape, the steps that build it, and the egress that serves it.

``blocked`` has loopback and nothing else, ``open`` is the host's network. ``filtered`` (an
allow-list, or ``open`` with a deny-list) is a namespace whose only ways out are listening sockets
of ours: a transparent one for every TCP connection, a resolver, and two proxies. Their file
descriptors are sent to the host, whose event loop checks the policy and connects.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.netlink import egress_setup, loopback_setup
from union.sandbox._net.budget import process_budget
from union.sandbox._net.egress import Egress
from union.sandbox._net.happy_eyeballs import HostResolver
from union.sandbox._net.policy import Policy
from union.sandbox._net.upstream import UpstreamDialer
from union.sandbox._plan import plan as p
from union.sandbox._policy.policy import NetworkRules
from union.sandbox._policy.upstream import parse_upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._net.own_server import OwnServer
    from union.sandbox._policy.decision import Decision

__all__ = [
    "ServerRules",
    "SessionNetwork",
    "network_steps",
    "proxy_variables",
    "resolv_conf",
    "shape_of",
]

_HTTP, _SOCKS, _TRANSPARENT, _DNS = 3128, 1080, 3129, 53
_RESOLVER: Final = "127.0.0.53"
_LOOPBACK, _LOOPBACK6 = "127.0.0.1", "::1"
_BACKLOG: Final = 512
_MIN_LISTENERS: Final = 5
"""Without IPv6."""
_NO_PROXY: Final = "localhost,127.0.0.1,::1"


def shape_of(network: NetworkSpec) -> NetworkShape:
    """Return the shape of the network namespace that a call needs."""
    if network.mode == "open":
        return "filtered" if network.deny else "open"
    return "filtered" if network.mode == "allowlist" else "blocked"


def has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6")


def network_steps(shape: NetworkShape, *, redirect: bool) -> tuple[p.Step, ...]:
    """Return the steps that set the namespace up; none for the host's own."""
    if shape == "open":
        return ()
    if shape == "blocked":
        found = loopback_setup()
    else:
        found = egress_setup(_TRANSPARENT, ipv6=has_ipv6(), redirect=redirect)
    steps: list[p.Step] = [p.Netlink(s.protocol, s.data, s.acks) for s in found]
    if shape == "filtered":
        steps += [_listen(_LOOPBACK, _HTTP), _listen(_LOOPBACK, _SOCKS)]
        steps += [_listen(_RESOLVER, _DNS, kind=socket.SOCK_DGRAM), _listen(_RESOLVER, _DNS)]
        steps.append(_listen(_LOOPBACK, _TRANSPARENT))
        if has_ipv6():
            steps.append(_listen(_LOOPBACK6, _TRANSPARENT))
    return tuple(steps)


def _listen(address: str, port: int, *, kind: int = socket.SOCK_STREAM) -> p.Listen:
    if ":" in address:
        raw = socket.inet_pton(socket.AF_INET6, address)
        packed = struct.pack("=H", socket.AF_INET6) + struct.pack(">HI16sI", port, 0, raw, 0)
        return p.Listen(socket.AF_INET6, kind, packed, _BACKLOG)
    packed = struct.pack("=H", socket.AF_INET)
    packed += struct.pack(">H4s8x", port, socket.inet_pton(socket.AF_INET, address))
    return p.Listen(socket.AF_INET, kind, packed, _BACKLOG)


def resolv_conf(shape: NetworkShape) -> bytes:
    if shape == "filtered":
        return f"nameserver {_RESOLVER}\noptions timeout:5 attempts:1\n".encode()
    return b""


def proxy_variables(network: NetworkSpec) -> dict[str, str]:
    """Return the proxy variables that clients read, in upper and lower case.

    All of them name the HTTP proxy, which tunnels any TCP connection: a client that finds a SOCKS
    address in ALL_PROXY and lacks the package for it fails without connecting.
    """
    shape = shape_of(network)
    if shape == "filtered":
        http: str | None = f"http://{_LOOPBACK}:{_HTTP}"
        socks: str | None = f"socks5h://{_LOOPBACK}:{_SOCKS}"
    elif shape == "open":
        http, socks = network.proxy_url, network.socks_url
    else:
        return {}
    everything = http or socks
    found = {"HTTP_PROXY": http, "HTTPS_PROXY": http, "ALL_PROXY": everything, "SOCKS_PROXY": socks}
    variables = {name: value for name, value in found.items() if value is not None}
    if variables:
        variables["NO_PROXY"] = _NO_PROXY
    return variables | {name.lower(): value for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class ServerRules:
    """The limits that a server puts on its sessions' connections, below their own policy."""

    own_server: OwnServer
    """No connection may end there."""
    proxies: NetworkRules | None
    """Upstream proxies that may be used; None means any, because the operator chose it."""


class SessionNetwork:
    """The parts of the network that the runs of one session share.

    These are its share of name lookups, its share of the process's file descriptors, and the
    address of its upstream proxy, which is resolved once.
    """

    def __init__(self, server: ServerRules | None = None) -> None:
        self._server = server
        self._resolver = HostResolver(self)
        self._share = process_budget.share()
        self._upstreams: dict[str, UpstreamDialer] = {}

    def open(
        self, network: NetworkSpec, fds: list[int], on_decision: Callable[[Decision], None]
    ) -> Egress:
        """Serve the listening sockets of a sandbox; takes ownership of ``fds``."""
        if len(fds) < _MIN_LISTENERS:
            for fd in fds:
                os.close(fd)
            raise OSError(
                errno.EPROTO,
                f"a sandbox sent {len(fds)} listening sockets; expected at least {_MIN_LISTENERS}",
            )
        http, socks, dns_udp, dns_tcp, transparent, *rest = (socket.socket(fileno=fd) for fd in fds)
        rules = NetworkRules(
            allow=None if network.mode == "open" else network.allow, deny=network.deny
        )
        egress = Egress(
            Policy(rules, own_server=None if self._server is None else self._server.own_server),
            http=http,
            socks=socks,
            tcp_transparent=transparent,
            tcp_transparent6=rest[0] if rest else None,
            dns_udp=dns_udp,
            dns_tcp=dns_tcp,
            upstream=self._upstream(network.proxy_url or network.socks_url),
            resolver=self._resolver,
            share=self._share,
            on_decision=on_decision,
        )
        egress.start()
        return egress

    def _upstream(self, url: str | None) -> UpstreamDialer | None:
        if url is None:
            return None
        known = self._upstreams.get(url)
        if known is None:
            known = self._upstreams[url] = UpstreamDialer(
                parse_upstream(url, argument="network_proxy_url"),
                resolver=self._resolver,
                rules=None if self._server is None else self._server.proxies,
                own_server=None if self._server is None else self._server.own_server,
            )
        return known
