"""What a transport tells about one command, and the values that come with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Event", "Exited", "Failed", "Started", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a command cost, with everything it started."""

    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    max_rss_bytes: int = 0
    """Of the largest single process."""
    peak_memory_bytes: int | None = None
    """Of the whole tree, where a control group measured it."""

    @property
    def cpu_s(self) -> float:
        """Processor time in all."""
        return self.cpu_user_s + self.cpu_system_s


class Started(NamedTuple):
    """The command runs; ``pid`` is its number inside the sandbox."""

    pid: int


class Exited(NamedTuple):
    """The command and everything it started has ended."""

    returncode: int
    reason: str
    usage: Usage


class Failed(NamedTuple):
    """No real exit: the command could not be started, or its end was never seen."""

    stage: str
    reason: str
    code: str = "execution"
    hint: str = ""


Event = Started | Exited | Failed
