"""The decision about one destination of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Decision", "FrontendName"]

FrontendName = Literal["tcp", "dns", "http", "socks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One connection or name lookup that a run requested, and the decision about it."""

    time: float
    """Time of the request, in seconds since the epoch."""
    door: FrontendName
    """Frontend that received it: ``tcp`` (transparent), ``dns``, ``http`` or ``socks``."""
    host: str
    """Requested name or address."""
    address: str
    """Connected address; empty without a connection."""
    port: int
    """Requested port; 0 for a lookup."""
    allowed: bool
    """Whether the policy allowed it."""
    rule: str
    """List entry or built-in rule that decided."""
    reason: str
    """Explanation of the decision."""
    suggestion: str = ""
    """Allow-list entry that would permit it; empty if none would."""
    error: str = ""
    """Reason why an allowed connection failed; empty otherwise."""
    bytes_up: int = 0
    """Bytes sent to the destination."""
    bytes_down: int = 0
    """Bytes received from the destination."""
    duration_ms: float = 0.0
    """Time from the request to the end of the connection, in milliseconds."""
    intercepted: bool = False
    """Whether an ``Http`` entry handled the connection: TLS ended in this process."""
