"""The redirection of outgoing TCP by iptables, for a kernel without nf_tables (gVisor).

The whole ``nat`` table of IPv4 is replaced in one call: setsockopt of ``IPTABLES_REPLACE`` on a raw
socket, with ``struct ipt_replace`` and its entries. The layout is the same on x86-64 and aarch64.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["IPTABLES_REPLACE", "iptables_redirect"]

IPTABLES_REPLACE: Final = (0, 64)
"""Level IPPROTO_IP and option IPT_SO_SET_REPLACE."""
_IPPROTO_TCP: Final = 6
_ENTRY_BYTES: Final = 112
"""Size of struct ipt_entry, after which the matches (none here) and the target follow."""
_ADDRESS_BYTES: Final = 84
"""Size of struct ipt_ip, its first member."""
_INVERT_DESTINATION: Final = 0x10
_ACCEPT: Final = -2
"""The verdict NF_ACCEPT as a standard target encodes it."""
_HOOKS: Final = 0b11011
"""PREROUTING, INPUT, OUTPUT and POSTROUTING; a nat table has no FORWARD."""
_MAP_PORTS: Final = 2
"""NF_NAT_RANGE_PROTO_SPECIFIED."""


def iptables_redirect(port: int) -> bytes:
    """Return the table that redirects TCP to ``port``, except to loopback addresses.

    Raises:
        ValueError: the port is out of range.

    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port must be 1..65535, got {port!r}")
    accept = _entry(_target(b"", struct.pack("=i4x", _ACCEPT)))
    address_range = struct.pack("=IIII", 1, _MAP_PORTS, 0, 0) + struct.pack(">HH4x", port, port)
    redirect = _entry(_target(b"REDIRECT", address_range), ip=_tcp_not_to_loopback())
    error = _entry(_target(b"ERROR", b"ERROR".ljust(32, b"\0")))
    # One chain for each hook: its rules, then its policy, which accepts.
    entries = (accept, accept, redirect, accept, accept, error)
    prerouting, input_, output, output_policy, postrouting, _ = _offsets(entries)
    hooks = (prerouting, input_, 0, output, postrouting)
    policies = (prerouting, input_, 0, output_policy, postrouting)
    content = b"".join(entries)
    head = struct.pack("=32sIII", b"nat", _HOOKS, len(entries), len(content))
    return head + struct.pack("=5I5IIQ", *hooks, *policies, 0, 0) + content


def _offsets(entries: tuple[bytes, ...]) -> list[int]:
    return [sum(map(len, entries[:at])) for at in range(len(entries))]


def _tcp_not_to_loopback() -> bytes:
    address = bytes((127, 0, 0, 0))
    mask = bytes((255, 0, 0, 0))
    ends = bytes(4) + address + bytes(4) + mask  # source, destination, and their masks
    interfaces = bytes(64)
    return ends + interfaces + struct.pack("=HBB", _IPPROTO_TCP, 0, _INVERT_DESTINATION)


def _entry(target: bytes, *, ip: bytes = bytes(_ADDRESS_BYTES)) -> bytes:
    size = _ENTRY_BYTES + len(target)
    counters = bytes(16)
    return ip + struct.pack("=IHHI", 0, _ENTRY_BYTES, size, 0) + counters + target


def _target(name: bytes, data: bytes) -> bytes:
    return struct.pack("=H29sB", 32 + len(data), name, 0) + data
