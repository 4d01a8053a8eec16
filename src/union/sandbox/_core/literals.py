"""The texts that arguments and results are limited to, as types."""

from __future__ import annotations

from typing import Literal

__all__ = ["BackendName", "NetworkMode", "ScriptType", "TerminationReason"]

BackendName = Literal["bubblewrap", "userns", "sandbox-exec", "none"]
NetworkMode = Literal["blocked", "allowlist", "open"]
ScriptType = Literal["shell", "python"]
TerminationReason = Literal[
    "",
    "signal",
    "timeout",
    "oom",
    "limit",
    "closed",
    "operator",
    "spawn-failed",
    "plan",
    "stream",
    "transport",
]
"""Empty after an exit, whatever its code. The last four mean that no real exit happened."""
