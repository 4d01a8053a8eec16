"""Where a server listens, as entries of a deny-list: no sandbox may dial them.

A sandbox with the open network would share the host's, and with it the server's own port. So on a
server with a TCP port, ``open`` is a network of its own, whose proxies refuse these addresses.
Other addresses of the host change over time: ``_net/own_server.py`` checks them when they are
dialled.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._policy.rules import Entry, parse_entries

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["own_entries"]

_ANY: Final = ("0.0.0.0", "::")  # noqa: S104 - to connect to these is to connect to this host
_LOOPBACK: Final = ("127.0.0.0/8", "::1")


def own_entries(listening: Iterable[tuple[str, int]]) -> tuple[Entry, ...]:
    """Deny-list entries for sockets that are bound to these addresses and ports."""
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
