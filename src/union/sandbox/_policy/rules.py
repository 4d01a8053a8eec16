"""Which destinations a run may reach: the one place that decides.

Deny entries first, then allow entries, then the default. Every door (transparent TCP, DNS, HTTP
proxy, SOCKS5) asks here and nowhere else, twice for a name: once about the name, and once about
each address it resolved to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from union.sandbox._policy.addresses import (
    canonical,
    embedded_ipv4,
    format_host_port,
    internal_range,
    looks_numeric,
    parse_address,
    parse_inet_aton,
    unreachable_range,
)
from union.sandbox._policy.entries import Entry, first_uncovered, parse_entries
from union.sandbox._policy.names import NameSyntaxError, normalise_name

if TYPE_CHECKING:
    from union.sandbox._policy.addresses import Address

__all__ = [
    "Entry",
    "NetworkRules",
    "Verdict",
    "decide_address",
    "decide_name",
    "decide_server_name",
    "first_uncovered",
    "parse_entries",
    "parse_host",
]


@dataclass(frozen=True, slots=True)
class NetworkRules:
    """``allow`` None: everything that is not denied. An empty tuple allows nothing."""

    allow: tuple[Entry, ...] | None
    deny: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer about one destination.

    ``rule`` is the entry that decided, or what stood in for one; ``suggestion`` is the allow-list
    entry that would have let it through, empty where none would.
    """

    allowed: bool
    rule: str
    reason: str
    suggestion: str = ""


def parse_host(host: str) -> Address | str:
    """Read a destination: an address in any spelling, or a name in its one spelling.

    Raises:
        NameSyntaxError: it is neither.

    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare:
        address = parse_address(bare)
        if address is None:
            raise NameSyntaxError("is not an IPv6 address without a zone")
        return address
    if bare is not host:
        raise NameSyntaxError("has brackets around something that is not an IPv6 address")
    name = normalise_name(host)
    if not looks_numeric(name):
        return name
    spelled = parse_inet_aton(name)
    if spelled is None:
        raise NameSyntaxError("ends in a number and is not an IPv4 address")
    return spelled


def decide_name(rules: NetworkRules, host: str, port: int | None) -> Verdict:
    """Judge a destination as a program wrote it. ``port`` None: a look-up, for any port.

    A yes about a name is not yet a yes about where it leads: see :func:`decide_address`.
    """
    try:
        parsed = parse_host(host)
    except NameSyntaxError as exc:
        return Verdict(allowed=False, rule="syntax", reason=f"the host {exc}")
    if not isinstance(parsed, str):
        return decide_address(rules, parsed, port, name=None)
    return _judge_name(rules, parsed, port)


def decide_address(
    rules: NetworkRules, address: Address | str, port: int | None, *, name: str | None
) -> Verdict:
    """Judge an address: one that was asked for (``name`` None), or one that ``name`` led to."""
    if isinstance(address, str):
        parsed = parse_address(address)
        if parsed is None:
            return Verdict(allowed=False, rule="syntax", reason="this is not an IP address")
        address = parsed
    address = canonical(address)
    inner = embedded_ipv4(address)
    for entry in rules.deny:
        if _holds(entry, address, port) or (inner is not None and _holds(entry, inner, port)):
            return _denied(entry, f"{address} is denied by {entry.text}")
    by_name = None if name is None else decide_name(rules, name, port)
    if by_name is not None and not by_name.allowed:
        return by_name
    if rules.allow is None:
        kind = unreachable_range(address)
        if kind:
            return Verdict(
                allowed=False, rule="internal", reason=f"{address} is {kind}: not reachable"
            )
        return Verdict(allowed=True, rule="open", reason="nothing denies it")
    for entry in rules.allow:
        if _holds(entry, address, port):
            return _allowed(entry)
    return _judge_unlisted_address(address, port, name=name, by_name=by_name)


def decide_server_name(
    rules: NetworkRules, server_name: str, port: int, *, name: str | None
) -> Verdict:
    """Judge the server name inside a TLS greeting on a connection that was already allowed.

    For a connection to ``name``, the greeting must ask for that name or for another allowed one:
    otherwise one allowed front would open every host behind it. For one to an address that an
    entry allows, everything at that address is allowed, but for names that are denied.
    """
    try:
        parsed = parse_host(server_name)
    except NameSyntaxError as exc:
        return Verdict(allowed=False, rule="syntax", reason=f"the TLS server name {exc}")
    if not isinstance(parsed, str):
        return decide_address(rules, parsed, port, name=None)
    if name is None:
        return _judge_name(NetworkRules(allow=None, deny=rules.deny), parsed, port)
    verdict = _judge_name(rules, parsed, port)
    if verdict.allowed or verdict.rule != "default":
        return verdict
    return _unlisted(
        f"the TLS server name {parsed} is not on the allow-list (connected to {name})",
        verdict.suggestion,
    )


def _judge_unlisted_address(
    address: Address, port: int | None, *, name: str | None, by_name: Verdict | None
) -> Verdict:
    """Judge an address that no entry names: only an allowed name can speak for it."""
    kind = internal_range(address)
    suggestion = format_host_port(str(address), port)
    if by_name is None:
        what = f" ({kind})" if kind else ""
        return _unlisted(f"{address}{what} is not on the allow-list", suggestion)
    if kind:
        return Verdict(
            allowed=False,
            rule="internal",
            reason=f"{name} leads to {address}, {kind}; only an IP or CIDR entry allows that",
            suggestion=suggestion,
        )
    return by_name


def _judge_name(rules: NetworkRules, name: str, port: int | None) -> Verdict:
    for entry in rules.deny:
        if _names(entry, name) and entry.port in {None, port}:
            return _denied(entry, f"{name} is denied by {entry.text}")
    if rules.allow is None:
        return Verdict(allowed=True, rule="open", reason="nothing denies it")
    for entry in rules.allow:
        if _names(entry, name) and (port is None or entry.port in {None, port}):
            return _allowed(entry)
    return _unlisted(f"{name} is not on the allow-list", format_host_port(name, port))


def _names(entry: Entry, name: str) -> bool:
    if entry.kind == "name":
        return name == entry.name
    return entry.kind == "pattern" and name.endswith("." + entry.name)


def _holds(entry: Entry, address: Address, port: int | None) -> bool:
    return (
        entry.network is not None
        and (entry.port is None or entry.port == port)
        and address.version == entry.network.version
        and address in entry.network
    )


def _allowed(entry: Entry) -> Verdict:
    return Verdict(allowed=True, rule=entry.text, reason=f"allowed by {entry.text}")


def _denied(entry: Entry, reason: str) -> Verdict:
    return Verdict(allowed=False, rule=entry.text, reason=reason)


def _unlisted(reason: str, suggestion: str) -> Verdict:
    return Verdict(allowed=False, rule="default", reason=reason, suggestion=suggestion)
