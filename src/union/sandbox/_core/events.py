"""The events of one command that a transport reports, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Event", "Exited", "Failed", "Started", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources used by a command and its children."""

    cpu_user_s: float = 0.0
    """Seconds of CPU time in user mode."""
    cpu_system_s: float = 0.0
    """Seconds of CPU time in the kernel."""
    max_rss_bytes: int = 0
    """Peak resident memory of the largest single process, in bytes."""
    peak_memory_bytes: int | None = None
    """Peak memory of the whole process tree, in bytes; None if no control group measured it."""

    @property
    def cpu_s(self) -> float:
        """Total CPU time in seconds."""
        return self.cpu_user_s + self.cpu_system_s


class Started(NamedTuple):
    """The command has started; ``pid`` is its process id inside the sandbox."""

    pid: int


class Exited(NamedTuple):
    """The command and all its children have ended."""

    returncode: int
    reason: str
    usage: Usage


class Failed(NamedTuple):
    """No real exit: the command was not started, or its end was not observed."""

    stage: str
    reason: str
    code: str = "execution"
    hint: str = ""


Event = Started | Exited | Failed
