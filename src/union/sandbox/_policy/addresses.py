"""Parse addresses in every spelling and classify them.

Rules apply to the address itself, whatever its spelling: ``0x7f.1``, ``127.1``, ``2130706433`` and
``::ffff:127.0.0.1`` are all 127.0.0.1. The tables list the ranges that are not the public internet.
They are written out because the standard library's definition of "private" differs between Python
releases.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

__all__ = [
    "Address",
    "Network",
    "canonical",
    "embedded_ipv4",
    "format_host_port",
    "internal_range",
    "looks_numeric",
    "parse_address",
    "parse_inet_aton",
    "unreachable_range",
]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_PART: Final = re.compile(r"0x[0-9a-f]+|0[0-7]*|[1-9][0-9]*", re.ASCII)
_NUMERIC_LABEL: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_MAX_DIGITS: Final = 16
"""Digits in one part of an IPv4 address. Longer numbers are invalid and slow to convert."""

_NAT64: Final = IPv6Network("64:ff9b::/96")
_6TO4: Final = IPv6Network("2002::/16")
_TEREDO: Final = IPv6Network("2001::/32")
_COMPATIBLE: Final = IPv6Network("::/96")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")

# Documentation ranges are not listed: host networks do not use them, so there is nothing to
# protect, while mirrors and test networks do use them.
_INTERNAL_V4: Final = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "an unspecified address"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a carrier's shared address"),
        ("127.0.0.0/8", "a loopback address"),
        ("168.63.129.16/32", "a cloud's host channel"),
        ("169.254.0.0/16", "a link-local or metadata address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a protocol assignment"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a benchmarking address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
)
_INTERNAL_V6: Final = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("ff00::/8", "a multicast address"),
        ("2001::/23", "a protocol assignment"),
        ("2002::/16", "a 6to4 address"),
    )
)
_UNREACHABLE: Final = ("an unspecified address", "a loopback address", "a multicast address")


def canonical(address: Address) -> Address:
    """Unwrap ``::ffff:a.b.c.d``, which the kernel treats as the IPv4 address ``a.b.c.d``."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def embedded_ipv4(address: Address) -> IPv4Address | None:
    """Return the IPv4 address that a translator or tunnel extracts from this IPv6 address."""
    if isinstance(address, IPv4Address):
        return None
    value = int(address)
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(value & 0xFFFFFFFF)
    if address in _6TO4:
        return IPv4Address((value >> 80) & 0xFFFFFFFF)
    if address in _TEREDO:
        return IPv4Address(~value & 0xFFFFFFFF)
    # ::1 and :: are not IPv4-compatible addresses.
    if address in _COMPATIBLE and value > 1:
        return IPv4Address(value & 0xFFFFFFFF)
    return None


def internal_range(address: Address) -> str:
    """Return the kind of a non-public address; empty for an address on the internet."""
    address = canonical(address)
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _INTERNAL_V4 if address in network), "")
    if address in _NAT64:
        # A host without IPv4 reaches all of IPv4 through NAT64, so the inner address counts.
        inner = internal_range(IPv4Address(int(address) & 0xFFFFFFFF))
        return f"{inner} behind NAT64" if inner else ""
    kind = next((kind for network, kind in _INTERNAL_V6 if address in network), "")
    if kind:
        return kind
    return "" if address in _GLOBAL_UNICAST else "not a global unicast address"


def unreachable_range(address: Address) -> str:
    """Return why an address is refused even on an open network; empty for all others.

    Loopback is the sandbox's own, never the host's. Unspecified and multicast addresses are not
    valid destinations.
    """
    inner = embedded_ipv4(address)
    for candidate in (address, *(() if inner is None else (inner,))):
        kind = internal_range(candidate)
        if kind in _UNREACHABLE:
            return kind
    return ""


def looks_numeric(name: str) -> bool:
    """Return whether resolvers parse this lower-case name as a number: its last label is one."""
    return _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]) is not None


def parse_inet_aton(text: str) -> IPv4Address | None:
    """Parse an IPv4 address like ``inet_aton``: one to four parts, hex, octal or decimal."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 4:
        return None
    numbers = []
    for part in parts:
        if len(part) > _MAX_DIGITS or _PART.fullmatch(part) is None:
            return None
        base = 16 if part.startswith("0x") else 8 if part.startswith("0") else 10
        numbers.append(int(part, base))
    *high, last = numbers
    if any(number > 255 for number in high) or last >= 256 ** (5 - len(numbers)):
        return None
    value = last
    for place, number in enumerate(high):
        value |= number << (24 - 8 * place)
    return IPv4Address(value)


def parse_address(text: str) -> Address | None:
    """Parse an address in standard notation; None for anything else, including zones."""
    if "%" in text or not text.isascii():
        return None
    try:
        return canonical(IPv6Address(text) if ":" in text else IPv4Address(text))
    except ValueError:
        return None


def format_host_port(host: str, port: int | None) -> str:
    """Format a host and an optional port in the notation of list entries."""
    if port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
