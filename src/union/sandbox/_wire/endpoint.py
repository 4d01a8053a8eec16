"""Where a server is: ``http://``, ``https://`` or ``unix://``, and the certificate to expect."""

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
    """One server, as its clients address it."""

    base: str
    """What the paths of the protocol are appended to."""
    socket: str | None = None
    """The path of a Unix socket."""
    fingerprint: bytes | None = None
    """SHA-256 of the one certificate that is accepted."""

    @property
    def is_secure(self) -> bool:
        """Nobody between here and there can read along."""
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


def _wrong(endpoint: object, why: str = "") -> SandboxUsageError:
    return SandboxUsageError(
        f"endpoint must be {_ACCEPTED}, not {endpoint!r}{why and ': ' + why}", argument="endpoint"
    )


def parse_fingerprint(text: str, *, argument: str) -> bytes:
    """The bytes of ``sha256:`` and 64 hexadecimal digits."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise SandboxUsageError(
            f"{argument} must be 'sha256:' and 64 hexadecimal digits, not {text!r}",
            argument=argument,
            hint="the server says it when it starts with --tls-self-signed",
        )
    return bytes.fromhex(match[1])


def parse_endpoint(endpoint: object) -> Endpoint:
    """Reads an endpoint; ``#sha256=...`` behind an ``https://`` one pins its certificate."""
    if not isinstance(endpoint, str):
        raise _wrong(endpoint)
    if not endpoint.isprintable() or " " in endpoint:
        # Some of these urlsplit takes out without a word: what is left is another address.
        raise _wrong(endpoint, "it holds a space or a control character")
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError as exc:
        raise _wrong(endpoint, str(exc)) from exc
    if url.username is not None or url.password is not None:
        # Not shown: it may well be the token.
        raise SandboxUsageError(
            "endpoint must not hold user information", argument="endpoint", hint="pass token="
        )
    if url.query:
        raise _wrong(endpoint, "it has a query")
    if url.scheme == "unix":
        if url.netloc or not url.path.startswith("/") or url.fragment:
            raise _wrong(endpoint)
        return Endpoint(base="http://localhost", socket=url.path)
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise _wrong(endpoint)
    if url.fragment and url.scheme != "https":
        raise _wrong(endpoint, "only an https endpoint has a certificate to pin")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    base = f"{url.scheme}://{host}" + ("" if port is None else f":{port}") + url.path.rstrip("/")
    pinned = parse_fingerprint(url.fragment, argument="endpoint") if url.fragment else None
    return Endpoint(base=base, fingerprint=pinned)
