"""What was decided about one destination of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Decision", "FrontendName"]

FrontendName = Literal["tcp", "dns", "http", "socks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One connection (or look-up) that a run asked for.

    ``time`` is seconds since the epoch when it was asked for. ``host`` is what the program named:
    a name, or an address; ``address`` is where the connection went, empty if nowhere. ``error``
    says why an allowed connection could not be made; it is empty otherwise.
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
