"""Upstream proxies that clients name: only those that the operator allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._policy.addresses import format_host_port
from union.sandbox._policy.rules import NetworkRules, decide_name
from union.sandbox._policy.upstream import parse_upstream
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._policy.rules import Entry

__all__ = ["check_proxies"]


def check_proxies(network: NetworkSpec, allowed: tuple[Entry, ...]) -> None:
    """Raise ``PolicyError`` for an upstream proxy that no ``--allow-proxy`` names.

    This server would dial it from its own network, so a proxy is a destination like any other.
    The addresses that its name resolves to are judged when it is dialled.
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
