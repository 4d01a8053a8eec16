"""Literal types of string arguments and results."""

from __future__ import annotations

from typing import Literal

__all__ = ["BackendName", "NetworkMode", "Persist", "ScriptType", "Shell", "TerminationReason"]

BackendName = Literal["bubblewrap", "userns", "landlock", "sandbox-exec", "none"]
NetworkMode = Literal["blocked", "allowlist", "open"]
Persist = Literal["workdir", "machine"]
ScriptType = Literal["shell", "python"]
Shell = Literal["bash", "sh"]
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
"""Empty after an exit with any code. The last four mean that no real exit happened."""
