"""The network of one run: its shape, the steps that build it, and its egress.

``blocked`` has only loopback; ``open`` is the host's network. ``filtered`` (an allow-list, or
``open`` with a deny-list or in a machine) is a network namespace whose only ways out are listening
sockets inside it: a transparent listener for every TCP connection, a resolver, and two proxies. The
launcher passes their file descriptors to the host's event loop, which applies the policy and dials.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._codecs.dns import TTL_S
from union.sandbox._codecs.iptables import IPTABLES_REPLACE, iptables_redirect
from union.sandbox._codecs.netlink import egress_setup, half_routes, loopback_setup
from union.sandbox._net.budget import process_budget
from union.sandbox._net.egress import Egress
from union.sandbox._net.happy_eyeballs import HostResolver
from union.sandbox._net.policy import Policy
from union.sandbox._net.upstream import UpstreamDialer
from union.sandbox._plan import plan as p
from union.sandbox._policy.rules import NetworkRules
from union.sandbox._policy.upstream import parse_upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._codecs.netlink import NetlinkStep
    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._net.interception import Interception
    from union.sandbox._net.own_server import OwnServer
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest

__all__ = [
    "DNS_PORT",
    "HTTP_PORT",
    "SOCKS_PORT",
    "ServerRules",
    "SessionNetwork",
    "loopback_proxy_variables",
    "network_steps",
    "proxy_variables",
    "resolv_conf",
    "rules_of",
    "shape_of",
]

HTTP_PORT, SOCKS_PORT, DNS_PORT = 3128, 1080, 53
_HTTP, _SOCKS, _TRANSPARENT, _DNS = HTTP_PORT, SOCKS_PORT, 3129, DNS_PORT
_RESOLVER: Final = "127.0.0.53"
_LOOPBACK, _LOOPBACK6 = "127.0.0.1", "::1"
_BACKLOG: Final = 512
_MIN_LISTENERS: Final = 5
"""File descriptors of a filtered network without IPv6."""
_NO_PROXY: Final = "localhost,127.0.0.1,::1"


def shape_of(network: NetworkSpec) -> NetworkShape:
    """Return the shape of the network namespace of a call."""
    if network.mode == "open":
        return "filtered" if network.deny or network.relayed else "open"
    return "filtered" if network.mode == "allowlist" else "blocked"


def rules_of(network: NetworkSpec) -> NetworkRules:
    """Return the rules of a filtered network; mode ``blocked`` allows nothing."""
    if network.mode == "blocked":
        return NetworkRules(allow=())
    return NetworkRules(allow=None if network.mode == "open" else network.allow, deny=network.deny)


def has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6")


def network_steps(
    shape: NetworkShape, *, redirect: bool, nf_tables: bool = True
) -> tuple[p.Step, ...]:
    """Return the steps that set up the namespace; none for the host's own network.

    Args:
        shape: the shape of the network.
        redirect: whether connections are redirected to the transparent listener.
        nf_tables: whether nf_tables does that. Default True; False: iptables, for IPv4 alone.

    """
    if shape == "open":
        return ()
    if shape == "blocked":
        steps = _netlink(loopback_setup())
    elif redirect and not nf_tables:
        # The rule is added before the routes, so that at no time a connection can be delivered to
        # the namespace itself.
        table = iptables_redirect(_TRANSPARENT)
        rule = p.SocketOption(
            socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW, *IPTABLES_REPLACE, table
        )
        steps = [*_netlink(loopback_setup()), rule, *_netlink(half_routes())]
    else:
        steps = _netlink(egress_setup(_TRANSPARENT, ipv6=has_ipv6(), redirect=redirect))
    if shape == "filtered":
        steps += [_listen(_LOOPBACK, _HTTP), _listen(_LOOPBACK, _SOCKS)]
        steps += [_listen(_RESOLVER, _DNS, kind=socket.SOCK_DGRAM), _listen(_RESOLVER, _DNS)]
        steps.append(_listen(_LOOPBACK, _TRANSPARENT))
        if has_ipv6():
            steps.append(_listen(_LOOPBACK6, _TRANSPARENT))
    return tuple(steps)


def _netlink(found: Iterable[NetlinkStep]) -> list[p.Step]:
    return [p.Netlink(step.protocol, step.data, step.acks) for step in found]


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
    """Return the proxy environment variables, in upper and lower case.

    ALL_PROXY names the HTTP proxy, which tunnels any TCP connection: a client that reads a SOCKS
    URL there and lacks SOCKS support fails without trying to connect.
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
    return _in_both_cases({name: value for name, value in found.items() if value is not None})


def loopback_proxy_variables(credentials: str, http: int, socks: int) -> dict[str, str]:
    """Return the variables for proxies on the host's loopback, which require a password."""
    return _in_both_cases(
        {
            "HTTP_PROXY": f"http://{credentials}@{_LOOPBACK}:{http}",
            "HTTPS_PROXY": f"http://{credentials}@{_LOOPBACK}:{http}",
            "ALL_PROXY": f"http://{credentials}@{_LOOPBACK}:{http}",
            "SOCKS_PROXY": f"socks5h://{credentials}@{_LOOPBACK}:{socks}",
        }
    )


def _in_both_cases(variables: dict[str, str]) -> dict[str, str]:
    if variables:
        variables = {**variables, "NO_PROXY": _NO_PROXY}
    return variables | {name.lower(): value for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class ServerRules:
    """Restrictions of a server on the connections of its sessions, beyond their own policy.

    Args:
        own_server: the server's listening sockets, which no connection may reach.
        proxies: rules for upstream proxies; None: all are allowed, the operator chose them.

    """

    own_server: OwnServer
    proxies: NetworkRules | None


class Records(Protocol):
    """Receives what an egress records."""

    def decision(self, decision: Decision) -> None:
        """Receive the decision about one connection or name lookup."""

    def request(self, request: HttpRequest) -> None:
        """Receive the record of one request to the host of an ``Http`` entry."""


class SessionNetwork:
    """The network state that all runs of one session share.

    It consists of the queue for name lookups, the share of the process's file descriptors, and the
    pinned addresses of the upstream proxy.

    Args:
        server: restrictions of the server that runs the session. Default None: no server.

    """

    def __init__(self, server: ServerRules | None = None) -> None:
        self._server = server
        self._resolver = HostResolver(self)
        self._share = process_budget.share()
        self._interception: Interception | None = None
        self._upstreams: dict[str, UpstreamDialer] = {}

    def forked(self) -> SessionNetwork:
        """Return the network of another session with the same restrictions."""
        return SessionNetwork(self._server)

    def open(
        self,
        network: NetworkSpec,
        fds: list[int],
        records: Records,
        *,
        ttl_s: int = TTL_S,
    ) -> Egress:
        """Start serving the listening sockets of a sandbox and take ownership of them.

        Args:
            network: the policy.
            fds: the listening sockets.
            records: receives decisions and requests.
            ttl_s: how long a client may cache an address. Default: 60 s.

        Raises:
            OSError: there are fewer sockets than a filtered network has. All are closed.

        """
        if len(fds) < _MIN_LISTENERS:
            for fd in fds:
                os.close(fd)
            raise OSError(
                errno.EPROTO,
                f"expected at least {_MIN_LISTENERS} listeners from the sandbox, got {len(fds)}",
            )
        http, socks, dns_udp, dns_tcp, transparent, *rest = (socket.socket(fileno=fd) for fd in fds)
        egress = Egress(
            self._policy(network),
            http=http,
            socks=socks,
            tcp_transparent=transparent,
            tcp_transparent6=rest[0] if rest else None,
            dns_udp=dns_udp,
            dns_tcp=dns_tcp,
            upstream=self._upstream(network.proxy_url or network.socks_url),
            resolver=self._resolver,
            share=self._share,
            on_decision=records.decision,
            ttl_s=ttl_s,
            interception=self.interception,
            on_request=records.request,
        )
        egress.start()
        return egress

    def open_mediated(
        self,
        network: NetworkSpec,
        records: Records,
        destination: Callable[[socket.socket], tuple[Address, int]],
    ) -> Egress:
        """Return an egress without listening sockets; connections are handed to ``adopt``."""
        return Egress(
            self._policy(network),
            http=None,
            socks=None,
            upstream=self._upstream(network.proxy_url or network.socks_url),
            resolver=self._resolver,
            share=self._share,
            on_decision=records.decision,
            destination=destination,
            interception=self.interception,
            on_request=records.request,
        )

    def open_proxies(
        self,
        network: NetworkSpec,
        listeners: tuple[socket.socket, ...],
        credentials: str,
        records: Records,
    ) -> Egress:
        """Start serving proxies on the host's loopback and take ownership of their sockets.

        Args:
            network: the policy.
            listeners: the sockets of the HTTP proxy and of the SOCKS proxy.
            credentials: ``user:password`` that clients must send.
            records: receives decisions and requests.

        """
        http, socks = listeners
        for listener in listeners:
            listener.setblocking(False)
        egress = Egress(
            self._policy(network),
            http=http,
            socks=socks,
            upstream=self._upstream(network.proxy_url or network.socks_url),
            resolver=self._resolver,
            share=self._share,
            on_decision=records.decision,
            credentials=credentials,
            interception=self.interception,
            on_request=records.request,
        )
        egress.start()
        return egress

    def interception(self) -> Interception:
        """Return the session's authority and the budgets of its ``Http`` entries."""
        if self._interception is None:
            from union.sandbox._net.interception import Interception

            self._interception = Interception()
        return self._interception

    def _policy(self, network: NetworkSpec) -> Policy:
        own = None if self._server is None else self._server.own_server
        return Policy(rules_of(network), own_server=own)

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
