"""Isolation: the layers that are enforced, machine-readable and printable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Isolation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The isolation layers between sandboxed code and the host, verified on a live sandbox.

    ``root``: how the private root was entered: ``pivot`` (pivot_root), ``move`` (a mount moved over
    the caller's root, where pivot_root is not permitted) or ``host`` (no private root).
    ``proc``: ``fresh`` (only processes of the sandbox), ``inherited`` (/proc of this container,
    which masks it and so allows no new one) or ``host``.
    ``ids``: ``unprivileged`` (an id that owns nothing on the host), ``caller`` or ``host``.
    ``limits``: what enforces each limit: ``cgroup-v2``, ``cgroup-v1``, ``rlimit``, ``tmpfs``,
    ``watch`` (the memory of the process tree is sampled every few milliseconds), ``nodes`` (only
    the requested device nodes exist), ``namespace`` (a limit of the session's user namespace or id)
    or ``none``.
    ``egress``: what enforces the network policy: ``kernel``, ``proxy-only`` or ``none``.
    """

    backend: str
    namespaces: tuple[str, ...] = ()
    root: str = "host"
    proc: str = "host"
    ids: str = "host"
    landlock_abi: int = 0
    seccomp: str = ""
    """Digest of the system-call filter; empty for none."""
    capabilities: tuple[str, ...] | None = None
    """Capabilities left in any set; None if they are not restricted."""
    no_new_privs: bool = False
    limits: tuple[tuple[str, str], ...] = ()
    egress: str = "none"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return dataclasses.asdict(self) | {"limits": dict(self.limits)}

    def __str__(self) -> str:
        return "\n".join(f"{name:<13} {_shown(value)}" for name, value in self.to_dict().items())


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items()) or "-"
    if isinstance(value, tuple | list):
        return " ".join(str(v) for v in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in {None, "", 0} else str(value)
