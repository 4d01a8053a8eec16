"""The report of what is enforced: facts, machine-readable and printable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Isolation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What stands between sandboxed code and the host, as verified on a live sandbox.

    ``root``: how the private root was entered: ``pivot``, ``move`` (pivot_root is refused here, so
    the caller's root stays mounted, covered by the private one) or ``host``: none.
    ``proc``: ``fresh`` (only the sandbox's own processes), ``inherited`` (this container masks
    /proc, so its own is shown) or ``host``.
    ``ids``: ``unprivileged`` (an id that owns nothing on the host), ``caller`` or ``host``.
    ``limits``: what enforces each limit: ``cgroup-v2``, ``cgroup-v1``, ``rlimit``, ``tmpfs``,
    ``watch`` (the memory of the tree is looked at every few milliseconds), ``nodes`` (no other
    device is there), ``namespace`` (the session's user namespace or id has a limit of its own) or
    ``none``.
    ``egress``: what enforces the network policy: ``kernel``, ``proxy-only`` or ``none``.
    """

    backend: str
    namespaces: tuple[str, ...] = ()
    root: str = "host"
    proc: str = "host"
    ids: str = "host"
    landlock_abi: int = 0
    seccomp: str = ""
    """Digest of the system-call filter; empty: none."""
    capabilities: tuple[str, ...] | None = None
    """What is left in any set; None: not restricted."""
    no_new_privs: bool = False
    limits: tuple[tuple[str, str], ...] = ()
    egress: str = "none"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
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
