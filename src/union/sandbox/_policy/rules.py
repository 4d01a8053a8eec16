"""The rules of one network policy, and the only functions that decide about a destination.

Deny entries come first, then allow entries, then the default. Every frontend (transparent TCP, DNS,
HTTP proxy, SOCKS5) uses these functions, twice for a name: once for the name, and once for each
address it resolves to.
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
    """The allow-list and deny-list of one policy.

    Args:
        allow: allowed destinations; empty: none; None: all that are not denied.
        deny: denied destinations, which override ``allow``. Default: empty.

    """

    allow: tuple[Entry, ...] | None
    deny: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about one destination.

    Args:
        allowed: whether it may be reached.
        rule: the list entry or built-in rule that decided.
        reason: explanation of the decision.
        suggestion: allow-list entry that would permit it. Default: empty, no entry would.

    """

    allowed: bool
    rule: str
    reason: str
    suggestion: str = ""


def parse_host(host: str) -> Address | str:
    """Parse a destination: an address in any spelling, or a name, which is normalised.

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
    address = parse_inet_aton(name)
    if address is None:
        raise NameSyntaxError("ends in a number and is not an IPv4 address")
    return address


def decide_name(rules: NetworkRules, host: str, port: int | None) -> Verdict:
    """Decide about a destination as a program wrote it. ``port`` None: a lookup for any port.

    An allowed name may still resolve to a refused address: see :func:`decide_address`.
    """
    try:
        parsed = parse_host(host)
    except NameSyntaxError as exc:
        return Verdict(allowed=False, rule="syntax", reason=f"the host {exc}")
    if not isinstance(parsed, str):
        return decide_address(rules, parsed, port, name=None)
    return _decide_normalised_name(rules, parsed, port)


def decide_address(
    rules: NetworkRules, address: Address | str, port: int | None, *, name: str | None
) -> Verdict:
    """Decide about an address: a requested one (``name`` None), or an address of ``name``."""
    if isinstance(address, str):
        parsed = parse_address(address)
        if parsed is None:
            return Verdict(allowed=False, rule="syntax", reason="the address is not an IP address")
        address = parsed
    address = canonical(address)
    inner = embedded_ipv4(address)
    for entry in rules.deny:
        if _matches_address(entry, address, port) or (
            inner is not None and _matches_address(entry, inner, port)
        ):
            return _denied(entry, f"{address} is denied by {entry.text}")
    by_name = None if name is None else decide_name(rules, name, port)
    if by_name is not None and not by_name.allowed:
        return by_name
    if rules.allow is None:
        kind = unreachable_range(address)
        if kind:
            return Verdict(
                allowed=False,
                rule="internal",
                reason=f"{address} is {kind}, which is never reachable",
            )
        return Verdict(allowed=True, rule="open", reason="nothing denies it")
    for entry in rules.allow:
        if _matches_address(entry, address, port):
            return _allowed(entry)
    return _decide_unlisted_address(address, port, name=name, by_name=by_name)


def decide_server_name(
    rules: NetworkRules, server_name: str, port: int, *, name: str | None
) -> Verdict:
    """Decide about the server name in a TLS ClientHello on an allowed connection.

    On a connection to ``name``, the server name must be that name or another allowed one:
    otherwise an allowed CDN would give access to every host behind it. On a connection to an
    address that an entry allows (``name`` None), every server name is allowed unless it is denied.
    """
    try:
        parsed = parse_host(server_name)
    except NameSyntaxError as exc:
        return Verdict(allowed=False, rule="syntax", reason=f"the TLS server name {exc}")
    if not isinstance(parsed, str):
        return decide_address(rules, parsed, port, name=None)
    if name is None:
        return _decide_normalised_name(NetworkRules(allow=None, deny=rules.deny), parsed, port)
    verdict = _decide_normalised_name(rules, parsed, port)
    if verdict.allowed or verdict.rule != "default":
        return verdict
    return _unlisted(
        f"the TLS server name {parsed} is not on the allow-list (connected to {name})",
        verdict.suggestion,
    )


def _decide_unlisted_address(
    address: Address, port: int | None, *, name: str | None, by_name: Verdict | None
) -> Verdict:
    """Decide about an address without an entry: only an allowed name can permit it."""
    kind = internal_range(address)
    suggestion = format_host_port(str(address), port)
    if by_name is None:
        suffix = f" ({kind})" if kind else ""
        return _unlisted(f"{address}{suffix} is not on the allow-list", suggestion)
    if kind:
        return Verdict(
            allowed=False,
            rule="internal",
            reason=f"{name} resolves to {address}, {kind}; only an IP or CIDR entry allows that",
            suggestion=suggestion,
        )
    return by_name


def _decide_normalised_name(rules: NetworkRules, name: str, port: int | None) -> Verdict:
    for entry in rules.deny:
        if _matches_name(entry, name) and entry.port in {None, port}:
            return _denied(entry, f"{name} is denied by {entry.text}")
    if rules.allow is None:
        return Verdict(allowed=True, rule="open", reason="nothing denies it")
    for entry in rules.allow:
        if _matches_name(entry, name) and (port is None or entry.port in {None, port}):
            return _allowed(entry)
    return _unlisted(f"{name} is not on the allow-list", format_host_port(name, port))


def _matches_name(entry: Entry, name: str) -> bool:
    if entry.kind == "name":
        return name == entry.name
    return entry.kind == "pattern" and name.endswith("." + entry.name)


def _matches_address(entry: Entry, address: Address, port: int | None) -> bool:
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
