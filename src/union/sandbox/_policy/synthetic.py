"""Synthetic addresses that represent names.

The stub resolver returns a synthetic address for each allowed name, so that a later connection to
that address can be checked and dialled by name. The addresses are valid only inside the run.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from union.sandbox._policy.addresses import Address

__all__ = ["MAX_NAMES", "SyntheticNames"]

# 198.18.0.0/15 is reserved for benchmarks: no real host has such an address. The IPv6 range is a
# unique local range that was generated at random.
_V4_BASE: Final = int(IPv4Address("198.18.0.0"))
_V6_BASE: Final = int(IPv6Address("fd5a:7b1c:93e4::"))
MAX_NAMES: Final = 65_536
"""Limit on names per run: it bounds the host memory that a program can use."""


class SyntheticNames:
    """Map names to synthetic addresses and back, for one run."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int | None:
        """Return the number of ``name``, or None if the limit is reached."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        if len(self._names) >= MAX_NAMES:
            return None
        self._names.append(name)
        # Numbers start at 1: the first address of a range denotes the range itself.
        self._numbers[name] = len(self._names)
        return len(self._names)

    def clear_if_full(self) -> None:
        """Forget all names once the limit is reached: a long-lived user can resolve new ones."""
        if len(self._names) >= MAX_NAMES:
            self._numbers.clear()
            self._names.clear()

    def addresses(self, name: str) -> tuple[IPv4Address, IPv6Address] | None:
        """Return the synthetic addresses of ``name``, or None if the limit is reached."""
        number = self.number(name)
        if number is None:
            return None
        return IPv4Address(_V4_BASE + number), IPv6Address(_V6_BASE + number)

    def name(self, address: Address) -> str | None:
        """Return the name of a synthetic address, or None for any other address."""
        base = _V4_BASE if isinstance(address, IPv4Address) else _V6_BASE
        number = int(address) - base
        return self._names[number - 1] if 1 <= number <= len(self._names) else None
