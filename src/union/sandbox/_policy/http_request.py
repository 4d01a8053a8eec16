"""The record of one HTTP request to a host with an ``Http`` entry."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HttpRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One request to a host with an ``Http`` entry: no header, no query and no body."""

    time: float
    """Time of the request, in seconds since the epoch."""
    method: str
    """Request method; empty if the request was malformed."""
    host: str
    """Name of the host."""
    path: str
    """Path without the query."""
    allowed: bool
    """Whether the rules allowed it."""
    reason: str
    """Explanation of the decision."""
    suggestion: str = ""
    """Rule that would allow it; empty if none would."""
    status: int = 0
    """Status code of the response; 0 without one."""
    error: str = ""
    """Reason why an allowed request failed; empty otherwise."""
    has_credential: bool = False
    """Whether the credential was put into the request."""
    bytes_up: int = 0
    """Bytes of the request body that were sent to the server."""
    bytes_down: int = 0
    """Bytes of the response body."""
    duration_ms: float = 0.0
    """Time from the request to the end of the response, in milliseconds."""
