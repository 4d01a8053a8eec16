"""The decision about one destination of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Decision", "FrontendName"]

FrontendName = Literal["tcp", "dns", "http", "socks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One connection or name lookup that a run requested, and the decision about it.

    Args:
        time: time of the request, in seconds since the epoch.
        door: the frontend that received it: ``"tcp"`` (transparent), ``"dns"``, ``"http"`` or
            ``"socks"``.
        host: requested name or address.
        address: connected address; empty if there was no connection.
        port: requested port; 0 for a lookup.
        allowed: whether the policy allowed it.
        rule: list entry or built-in rule that decided.
        reason: explanation of the decision.
        suggestion: allow-list entry that would permit it. Default: empty, no entry would.
        error: why an allowed connection failed. Default: empty, it did not fail.
        bytes_up: bytes sent to the destination. Default: 0.
        bytes_down: bytes received from the destination. Default: 0.
        duration_ms: time until the connection ended, in milliseconds. Default: 0.

    """

    time: float
    door: FrontendName
    host: str
    address: str
    port: int
    allowed: bool
    rule: str
    reason: str
    suggestion: str = ""
    error: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: float = 0.0
