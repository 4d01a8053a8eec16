"""Parse the entries of allow-lists and deny-lists strictly, into one canonical spelling.

An entry is a DNS name, a ``*.`` pattern, an IP address or a CIDR range, each with an optional
``:port``. Anything else is an error that names the entry and, where the intention is clear, the
correct spelling: a list must never silently mean something else.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from union.sandbox._policy.addresses import format_host_port, looks_numeric, parse_inet_aton
from union.sandbox._policy.names import NameSyntaxError, normalise_name
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._policy.addresses import Network
    from union.sandbox._policy.http_entries import Http

__all__ = ["Entry", "first_uncovered", "has_http", "parse_entries"]

_ACCEPTED: Final = (
    "an entry is a DNS name ('example.com'), a pattern ('*.example.com'), an IP address "
    "('192.0.2.1', '2001:db8::1') or a CIDR range ('192.0.2.0/24'), each with an optional port "
    "('example.com:443', '[2001:db8::1]:443')"
)
_DIGITS: Final = re.compile(r"[0-9]{1,6}", re.ASCII)
_CIDR_START: Final = re.compile(r"[0-9.]+/|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*/", re.ASCII)
_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_MAX_SHOWN_CHARS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One validated entry.

    Args:
        text: canonical spelling.
        kind: ``"name"``, ``"pattern"`` or ``"network"``.
        name: the name, or the pattern without ``*.``. Default: empty, for a network.
        network: an address (as a range of one) or a range. Default None: a name or pattern.
        port: a port. Default None: every port.
        http: rules and credential for the requests to this name. Default None: connections are
            tunnelled.

    """

    text: str
    kind: Literal["name", "pattern", "network"]
    name: str = ""
    network: Network | None = None
    port: int | None = None
    http: Http | None = None


def parse_entries(value: object, *, argument: str) -> tuple[Entry, ...]:
    """Parse a whole list. Duplicates are dropped; the order is kept.

    Raises:
        PolicyError: an entry is invalid; names ``argument``, the entry and the accepted forms.

    """
    if isinstance(value, (str, bytes)):
        raise PolicyError(
            f"{argument} must be a list of strings, got the string {_abbreviated(value)}",
            argument=argument,
            hint=f"write [{_abbreviated(value)}]" if isinstance(value, str) else _ACCEPTED,
        )
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise PolicyError(
            f"{argument} must be a list of strings, got {type(value).__name__}",
            argument=argument,
            hint=_ACCEPTED,
        )
    items = list(value)
    if isinstance(value, (set, frozenset)):
        items.sort(key=str)
    entries: dict[str, Entry] = {}
    for position, item in enumerate(items):
        if isinstance(item, Entry):
            entry = item
        elif isinstance(item, str):
            entry = _EntryParser(item, argument, position).parse()
        elif (found := _http_entry(item, argument)) is not None:
            entry = found
            other = entries.get(entry.text)
            if other is not None and other.http is not entry.http:
                raise PolicyError(
                    f"{argument}[{position}]: {entry.text} is in the list twice",
                    argument=argument,
                    hint="use one Http entry per host, with all rules in allow=",
                )
        else:
            raise PolicyError(
                f"{argument}[{position}] must be a string, got {_abbreviated(item)} "
                f"({type(item).__name__})",
                argument=argument,
                hint=_ACCEPTED,
            )
        entries[entry.text] = entry
    return tuple(entries.values())


def _http_entry(item: object, argument: str) -> Entry | None:
    """Return the entry of an ``Http``; None for another value."""
    from union.sandbox._policy.http_entries import Http

    if not isinstance(item, Http):
        return None
    if argument != "network_allowlist":
        raise PolicyError(f"{argument} cannot have an Http entry", argument=argument)
    return Entry(text=item.text, kind="name", name=item.host, port=item.port, http=item)


def has_http(network: NetworkSpec) -> bool:
    """Return whether the network of a call has an ``Http`` entry."""
    return bool(network.allow) and any(entry.http is not None for entry in network.allow)


def first_uncovered(entries: tuple[Entry, ...], *, ceiling: tuple[Entry, ...]) -> Entry | None:
    """Return the first of ``entries`` that would allow more than ``ceiling`` does, or None.

    Each entry must lie within a single entry of the ceiling, not within a union of several.
    """
    for entry in entries:
        if not any(_covers(wide, entry) for wide in ceiling):
            return entry
    return None


def _covers(wide: Entry, narrow: Entry) -> bool:
    if wide.port is not None and wide.port != narrow.port:
        return False
    if wide.http is not None:
        from union.sandbox._policy.http_entries import covers

        return narrow.http is not None and covers(wide.http, narrow.http)
    if isinstance(wide.network, IPv4Network):
        return isinstance(narrow.network, IPv4Network) and narrow.network.subnet_of(wide.network)
    if isinstance(wide.network, IPv6Network):
        return isinstance(narrow.network, IPv6Network) and narrow.network.subnet_of(wide.network)
    if narrow.kind == "network":
        # A name does not cover an address, which would bypass the check of internal ranges.
        return False
    if wide.kind == "name":
        return narrow.kind == "name" and narrow.name == wide.name
    is_subdomain = narrow.name.endswith("." + wide.name)
    return is_subdomain or (narrow.kind == "pattern" and narrow.name == wide.name)


class _EntryParser:
    """Parse one entry. Every error names its argument and position."""

    def __init__(self, text: str, argument: str, position: int) -> None:
        self._text = text
        self._argument = argument
        self._where = f"{argument}[{position}] {_abbreviated(text)}"

    def parse(self) -> Entry:
        text = self._text
        self._reject_other_syntax(text)
        host, port = self._split_port(text)
        if "*" in host:
            return self._pattern(host, port)
        if ":" in host or "/" in host:
            return self._network(host, port)
        name = self._name(host)
        if looks_numeric(name):
            return self._network(host, port)
        return Entry(text=format_host_port(name, port), kind="name", name=name, port=port)

    def _reject(self, why: str, hint: str = _ACCEPTED) -> NoReturn:
        raise PolicyError(f"{self._where} {why}", argument=self._argument, hint=hint)

    def _reject_other_syntax(self, text: str) -> None:
        if not text:
            self._reject("is empty")
        if any(c.isspace() or unicodedata.category(c) in {"Cc", "Cf"} for c in text):
            self._reject("contains a space or a control character")
        if "://" in text:
            host = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
            self._reject("is a URL", f"write only its host: {_abbreviated(host)}")
        if "@" in text:
            self._reject(
                "contains user information",
                f"write only the host: {_abbreviated(text.rpartition('@')[2])}",
            )
        if any(c in text for c in "\\?#;,"):
            self._reject("contains a character that is not allowed in a host", _ACCEPTED)
        if "/" in text and not _CIDR_START.match(text.removeprefix("[")):
            self._reject(
                "contains a path, or a range that does not start with an IP address",
                f"{_ACCEPTED}; paths cannot be restricted",
            )
        if "%" in text:
            self._reject("contains '%': zones and percent-encoding are not accepted")

    def _split_port(self, text: str) -> tuple[str, int | None]:
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or ":" not in host:
                self._reject("has brackets around something that is not an IPv6 address")
            if not rest:
                return host, None
            if not rest.startswith(":"):
                self._reject("has something other than ':port' after the brackets")
            return host, self._port(rest[1:])
        if text.count(":") >= 2:
            # IPv6 without brackets cannot carry a port: 2001:db8::1:443 is an address.
            return text, None
        host, colon, port = text.partition(":")
        if colon and not host:
            self._reject("has a port and no host")
        return host, self._port(port) if colon else None

    def _port(self, text: str) -> int:
        if _DIGITS.fullmatch(text) is None or str(int(text)) != text:
            self._reject(
                f"has the port {_abbreviated(text)}, which is not a number from 1 to 65535"
            )
        port = int(text)
        if not 1 <= port <= 65535:
            self._reject(f"has the port {port}; ports are 1 to 65535")
        return port

    def _name(self, host: str) -> str:
        try:
            return normalise_name(host)
        except NameSyntaxError as exc:
            self._reject(str(exc))

    def _pattern(self, host: str, port: int | None) -> Entry:
        deny = self._argument.endswith("denylist")
        if host.rstrip(".") == "*":
            self._reject(
                "would match every host",
                "use network_mode='blocked'"
                if deny
                else "use network_mode='open', with a network_denylist for hosts to exclude",
            )
        if not host.startswith("*.") or "*" in host[2:]:
            self._reject(
                "has a wildcard that is not a leading '*.'",
                "'*.example.com' covers every name under example.com, at any depth",
            )
        name = self._name(host[2:])
        if looks_numeric(name):
            self._reject("is a pattern over an IP address", "write a CIDR range: '192.0.2.0/24'")
        # Denying a whole top-level domain is prudent; allowing one is nearly always a mistake.
        if "." not in name and not deny:
            self._reject(
                "would match a whole top-level domain",
                "name at least two labels: '*.example.com'",
            )
        return Entry(text=format_host_port(f"*.{name}", port), kind="pattern", name=name, port=port)

    def _network(self, host: str, port: int | None) -> Entry:
        base, slash, prefix = host.partition("/")
        address = self._address(base)
        width: int = address.max_prefixlen
        if not slash:
            length = width
        elif _DIGITS.fullmatch(prefix) is None or int(prefix) > width:
            self._reject(
                f"has the prefix length {_abbreviated(prefix)}; it is a number from 0 to {width}"
            )
        else:
            length = int(prefix)
        # format_host_port puts an IPv6 range in brackets as it does an address.
        network: Network
        if isinstance(address, IPv6Address):
            network = IPv6Network((address, length), strict=False)
            if network.subnet_of(_MAPPED):
                mapped = IPv4Address(int(address) & 0xFFFFFFFF)
                network = IPv4Network((mapped, length - 96), strict=False)
                address = mapped
                width = 32
        else:
            network = IPv4Network((address, length), strict=False)
        if network.network_address != address:
            self._reject(
                "is not the start of its range", f"the range that contains it is '{network}'"
            )
        if network.prefixlen == 0 and not self._argument.endswith("denylist"):
            self._reject(
                "covers every address, including the host's own",
                "use network_mode='open', with a network_denylist for hosts to exclude",
            )
        written = str(address) if network.prefixlen == width else str(network)
        return Entry(
            text=format_host_port(written, port), kind="network", network=network, port=port
        )

    def _address(self, text: str) -> IPv4Address | IPv6Address:
        try:
            return IPv6Address(text) if ":" in text else IPv4Address(text)
        except ValueError:
            pass
        if ":" in text:
            self._reject(
                "is not an IPv6 address", "a port goes after brackets: '[2001:db8::1]:443'"
            )
        spelled = parse_inet_aton(text.lower().removesuffix("."))
        if spelled is None:
            self._reject("ends in a number and is not an IPv4 address")
        return self._reject("is an unusual spelling of an IPv4 address", f"write '{spelled}'")


def _abbreviated(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
