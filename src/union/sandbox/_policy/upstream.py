"""Parse the URL of the caller's own proxy, which carries allowed connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote_to_bytes, urlsplit

from union.sandbox._policy.addresses import format_host_port
from union.sandbox._policy.entries import Entry, parse_entries
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Upstream", "parse_allowed_proxies", "parse_upstream"]

_SCHEMES: Final[dict[str, tuple[Literal["http", "socks5"], int]]] = {
    "http": ("http", 8080),
    "socks5": ("socks5", 1080),
    "socks5h": ("socks5", 1080),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Protocol, address and credentials of a proxy.

    Args:
        kind: ``"http"`` or ``"socks5"``.
        host: name or address of the proxy.
        port: its port.
        username: user name. Default: empty, no authentication.
        password: password. Default: empty. Not part of ``repr()``.

    """

    kind: Literal["http", "socks5"]
    host: str
    port: int
    username: bytes = b""
    password: bytes = field(default=b"", repr=False)


def parse_allowed_proxies(values: Sequence[str], *, argument: str) -> tuple[Entry, ...]:
    """Parse the proxies that an operator allows: URLs, or hosts with an optional port.

    Raises:
        PolicyError: a value is invalid or contains credentials; names ``argument``.

    """
    hosts: list[str] = []
    for value in values:
        if "://" not in value:
            hosts.append(value)
            continue
        upstream = parse_upstream(value, argument=argument)
        if upstream.username or upstream.password:
            raise PolicyError(
                f"{argument} contains a user name or a password; clients pass their own",
                argument=argument,
                hint="write only scheme, host and port: http://proxy.example:3128",
            )
        hosts.append(format_host_port(upstream.host, upstream.port))
    return parse_entries(hosts, argument=argument)


def parse_upstream(url: str, *, argument: str) -> Upstream:
    """Parse ``http://[user:password@]host[:port]``, or the same with ``socks5`` or ``socks5h``.

    Raises:
        PolicyError: the URL is invalid; names ``argument`` and omits the URL, which may contain a
            password.

    """
    accepted = "accepted: http://, socks5:// or socks5h://, then a host and an optional port"
    if not url.isprintable() or " " in url:
        raise PolicyError(
            f"{argument} contains a space or a control character", argument=argument, hint=accepted
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise PolicyError(f"{argument}: {exc}", argument=argument, hint=accepted) from exc
    known = _SCHEMES.get(parts.scheme)
    if known is None:
        raise PolicyError(
            f"{argument} has the unknown scheme {parts.scheme!r}", argument=argument, hint=accepted
        )
    kind, default_port = known
    if not parts.hostname or parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise PolicyError(
            f"{argument} must have a host and nothing after the port",
            argument=argument,
            hint=accepted,
        )
    username = unquote_to_bytes(parts.username or "")
    password = unquote_to_bytes(parts.password or "")
    if max(len(username), len(password)) > 255:
        raise PolicyError(
            f"{argument} has a user name or password over 255 bytes",
            argument=argument,
            hint=accepted,
        )
    return Upstream(
        kind=kind,
        host=parts.hostname,
        port=default_port if port is None else port,
        username=username,
        password=password,
    )
