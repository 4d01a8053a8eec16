"""Network policy that a server adds to its sessions: its own addresses, and upstream proxies.

A sandbox with the open network would share the host's, and with it the server's own port. So on a
server with a TCP port, ``open`` is a network namespace of its own, whose proxies deny the server's
addresses. Other addresses of the host change over time: ``_net/own_server.py`` checks them for
every connection.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._policy.addresses import format_host_port
from union.sandbox._policy.rules import Entry, NetworkRules, decide_name, parse_entries
from union.sandbox._policy.upstream import parse_upstream
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from union.sandbox._core.spec import NetworkSpec

__all__ = ["check_proxies", "own_address_entries"]

_ANY: Final = ("0.0.0.0", "::")  # noqa: S104 - connecting to these connects to this host
_LOOPBACK: Final = ("127.0.0.0/8", "::1")


def own_address_entries(listening: Iterable[tuple[str, int]]) -> tuple[Entry, ...]:
    """Return deny-list entries for the addresses and ports at which the server listens."""
    found: list[str] = []
    for host, port in listening:
        address = ip_address(host.partition("%")[0])
        targets = {*_ANY}
        if address.is_unspecified or address.is_loopback:
            targets |= {*_LOOPBACK}
        else:
            targets.add(str(address))
        found += [_entry(target, port) for target in sorted(targets)]
    return parse_entries(found, argument="network_denylist")


def _entry(target: str, port: int) -> str:
    return f"[{target}]:{port}" if ":" in target else f"{target}:{port}"


def check_proxies(network: NetworkSpec, allowed: tuple[Entry, ...]) -> None:
    """Check that the operator allows the upstream proxies of a session.

    The server connects to a proxy from its own network, so a proxy is a destination like any other.
    The addresses that its name resolves to are checked for every connection.

    Raises:
        PolicyError: code ``proxy-refused``; no ``--allow-proxy`` names the proxy.

    """
    for argument, url in (
        ("network_proxy_url", network.proxy_url),
        ("network_socks_url", network.socks_url),
    ):
        if url is None:
            continue
        upstream = parse_upstream(url, argument=argument)
        verdict = decide_name(NetworkRules(allow=allowed), upstream.host, upstream.port)
        if not verdict.allowed:
            place = format_host_port(upstream.host, upstream.port)
            raise PolicyError(
                f"{argument}: this server does not allow the upstream proxy {place}",
                argument=argument,
                code="proxy-refused",
                hint=f"the operator allows it with: sandbox-server --allow-proxy {place}",
            )
