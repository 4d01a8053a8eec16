"""Where a server listens, as entries of a deny-list: no sandbox may dial them.

A sandbox with the open network would share the host's, and with it the server's own port. So on a
server with a TCP port, ``open`` is a network of its own whose doors refuse exactly these addresses.
"""

from __future__ import annotations

import contextlib
import socket
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

from union.sandbox._core.hosts import Entry, parse_entries

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
        if address.is_unspecified:
            targets |= {*_LOOPBACK, *_local_addresses()}
        elif address.is_loopback:
            targets |= {*_LOOPBACK}
        else:
            targets.add(str(address))
        found += [_entry(target, port) for target in sorted(targets)]
    return parse_entries(found, argument="network_denylist")


def _entry(target: str, port: int) -> str:
    return f"[{target}]:{port}" if ":" in target else f"{target}:{port}"


def _local_addresses() -> set[str]:
    """Every address of this host, as the kernel lists them now."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6", encoding="ascii") as f:
        for line in f:
            found.add(str(IPv6Address(bytes.fromhex(line.split()[0]))))
    with contextlib.suppress(FileNotFoundError), open("/proc/net/fib_trie", encoding="ascii") as f:
        candidate = ""
        for line in f:
            words = line.split()
            if words[:1] == ["|--"]:
                candidate = words[1]
            elif words[:3] == ["/32", "host", "LOCAL"]:
                found.add(candidate)
    with contextlib.suppress(OSError):
        # Where /proc/net is not to be read, at least what the host's own name stands for.
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return {address.partition("%")[0] for address in found}
