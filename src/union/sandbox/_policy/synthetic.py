"""Addresses that stand for names.

The resolver inside hands out an address of its own for each allowed name, so that a later connect
to that address can be judged and dialled by name. The addresses mean nothing outside the run.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from union.sandbox._policy.addresses import Address

__all__ = ["MAX_NAMES", "SyntheticNames"]

# 198.18.0.0/15 is set aside for benchmarks: no real host has such an address. The IPv6 range is a
# locally assigned one, chosen once at random.
_V4_BASE: Final = int(IPv4Address("198.18.0.0"))
_V6_BASE: Final = int(IPv6Address("fd5a:7b1c:93e4::"))
MAX_NAMES: Final = 65_536
"""Names that one run may look up; a bound on what a program can make the host remember."""


class SyntheticNames:
    """Name to address and back, for one run."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int | None:
        """Return the number that stands for ``name``, or None when there is no room for it."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        if len(self._names) >= MAX_NAMES:
            return None
        self._names.append(name)
        # From 1: the first address of a range reads as the name of the range.
        self._numbers[name] = len(self._names)
        return len(self._names)

    def addresses(self, name: str) -> tuple[IPv4Address, IPv6Address] | None:
        """Return the two addresses that stand for ``name``."""
        number = self.number(name)
        if number is None:
            return None
        return IPv4Address(_V4_BASE + number), IPv6Address(_V6_BASE + number)

    def name(self, address: Address) -> str | None:
        """Return the name that ``address`` stands for, or None if it is an ordinary address."""
        base = _V4_BASE if isinstance(address, IPv4Address) else _V6_BASE
        number = int(address) - base
        return self._names[number - 1] if 1 <= number <= len(self._names) else None
