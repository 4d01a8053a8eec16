"""The memory of a pod, shared between the server and its sandboxes.

A cluster may limit the memory of a pod without the caller's knowledge, by a LimitRange for example.
A run that is not limited itself would then exhaust the pod, and the kernel would end any of its
processes. The limit is therefore read in the pod, and runs get what the server leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from union.sandbox._linux import cgroup
from union.sandbox.errors import SandboxExecutionError

__all__ = ["within_pod"]

_RESERVE: Final = 128 * 2**20
"""What the server and its supervisor are left, or a quarter of a smaller pod."""
_SERVER: Final = 64 * 2**20
"""What a server uses under load. The supervisor, this process, has its memory already."""
_MIN: Final = 16 * 2**20
"""Less serves no run."""


def within_pod(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a session with a memory limit that its pod can keep.

    Raises:
        SandboxExecutionError: the pod has too little memory for a server and a run.

    """
    limit = cgroup.memory_limit()
    if limit is None:
        return arguments
    room = limit - max(min(_RESERVE, limit // 4), _own_peak() + _SERVER)
    if room < _MIN:
        raise SandboxExecutionError(
            f"the pod has a memory limit of {limit} bytes, of which the server needs "
            f"{limit - room}: that leaves too little for a run",
            code="pod-memory",
            hint="raise the memory of the environment (resources=), or the limits of the namespace",
        )
    resources = dict(arguments.get("resources") or {})
    asked = resources.get("memory")
    resources["memory"] = room if asked is None else min(int(asked), room)
    return {**arguments, "resources": resources}


def _own_peak() -> int:
    """Return the peak memory of this program; getrusage() counts that of its parent before exec."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # gVisor has no such line; the reserve stands for it
