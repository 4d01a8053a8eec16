"""Endpoints of a server: ``http://``, ``https://`` or ``unix://``, and a pinned certificate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from union.sandbox.errors import SandboxUsageError

__all__ = ["Endpoint", "parse_endpoint", "parse_fingerprint"]

_ACCEPTED: Final = "'http://HOST:PORT', 'https://HOST:PORT' or 'unix:///PATH/TO/SOCKET'"
_DIGEST: Final = re.compile(r"sha256[:=]([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of one server."""

    base: str
    """The URL that the paths of the protocol are appended to."""
    socket: str | None = None
    """The path of a Unix socket."""
    fingerprint: bytes | None = None
    """SHA-256 of the only certificate that is accepted."""

    @property
    def is_secure(self) -> bool:
        """Whether no third party can read the traffic: TLS, loopback or a Unix socket."""
        if self.socket is not None or self.base.startswith("https:"):
            return True
        host = urlsplit(self.base).hostname or ""
        if host == "localhost":
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.base if self.socket is None else f"unix://{self.socket}"


def _usage_error(endpoint: object, why: str = "") -> SandboxUsageError:
    return SandboxUsageError(
        f"endpoint must be {_ACCEPTED}, not {endpoint!r}{why and ': ' + why}", argument="endpoint"
    )


def parse_fingerprint(text: str, *, argument: str) -> bytes:
    """Return the bytes of ``sha256:`` and 64 hexadecimal digits."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise SandboxUsageError(
            f"{argument} must be 'sha256:' and 64 hexadecimal digits, not {text!r}",
            argument=argument,
            hint="the server prints it when it starts with --tls-self-signed",
        )
    return bytes.fromhex(match[1])


def parse_endpoint(endpoint: object) -> Endpoint:
    """Parse an endpoint; ``#sha256=...`` after an ``https://`` URL pins its certificate."""
    if not isinstance(endpoint, str):
        raise _usage_error(endpoint)
    if not endpoint.isprintable() or " " in endpoint:
        # urlsplit removes some of these silently, which leaves a different address.
        raise _usage_error(endpoint, "it contains a space or a control character")
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError as exc:
        raise _usage_error(endpoint, str(exc)) from exc
    if url.username is not None or url.password is not None:
        # The value is not shown, because it may be the token.
        raise SandboxUsageError(
            "endpoint must not contain user information", argument="endpoint", hint="pass token="
        )
    if url.query:
        raise _usage_error(endpoint, "it has a query")
    if url.scheme == "unix":
        if url.netloc or not url.path.startswith("/") or url.fragment:
            raise _usage_error(endpoint)
        return Endpoint(base="http://localhost", socket=url.path)
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise _usage_error(endpoint)
    if url.fragment and url.scheme != "https":
        raise _usage_error(endpoint, "only an https endpoint has a certificate to pin")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    base = f"{url.scheme}://{host}" + ("" if port is None else f":{port}") + url.path.rstrip("/")
    pinned = parse_fingerprint(url.fragment, argument="endpoint") if url.fragment else None
    return Endpoint(base=base, fingerprint=pinned)
