"""The access to a server: endpoint, token and certificate, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

from union.sandbox._wire.endpoint import parse_endpoint, parse_fingerprint
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import socket

    from union.sandbox._wire.endpoint import Endpoint

__all__ = ["Access", "resolve_access"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One server, and the credentials for it."""

    endpoint: Endpoint
    token: str | None = dataclasses.field(default=None, repr=False)
    ca: str | None = None
    """The path of a file with certificates to trust."""
    connect_timeout_s: float
    lazy: bool
    owner_socket: socket.socket | None = None
    """The socket to a server that this process started, used for the first connection."""


def resolve_access(
    endpoint: object,
    *,
    token: object,
    cert: object,
    connect_timeout_s: float | None,
    lazy: bool,
) -> Access:
    """Check the arguments of ``remote.session()`` that concern the server."""
    parsed = parse_endpoint(endpoint)
    if token is not None and (
        not isinstance(token, str) or not token or not token.isascii() or not token.isprintable()
    ):
        # The value is not shown, because even a malformed token is a secret.
        raise SandboxUsageError("token must be printable ASCII text", argument="token")
    ca = None
    if cert is not None:
        if not isinstance(cert, str) or not parsed.base.startswith("https:"):
            raise SandboxUsageError(
                f"cert must be 'sha256:...' or the path of a file, for an https endpoint, "
                f"not {cert!r}",
                argument="cert",
            )
        if cert.startswith(("sha256:", "sha256=")):
            pinned = parse_fingerprint(cert, argument="cert")
            parsed = dataclasses.replace(parsed, fingerprint=pinned)
        else:
            ca = cert
    if token is not None and not parsed.is_secure:
        warnings.warn(
            f"the token is sent to {parsed} without encryption; use https",
            UserWarning,
            stacklevel=3,
        )
    return Access(
        endpoint=parsed,
        token=token,
        ca=ca,
        connect_timeout_s=connect_timeout_s or 0.0,
        lazy=lazy,
    )
