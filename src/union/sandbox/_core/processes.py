"""Descriptions of the processes of a context, and of a session that keeps them between commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_COMMAND_BYTES", "MAX_LISTED", "ProcessInfo"]

MAX_LISTED: Final = 4096
"""The most processes in one listing."""
MAX_COMMAND_BYTES: Final = 4096
"""The most bytes of a command line in a listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One process of a context, or of a session with ``persist="machine"``.

    Sandboxed code chooses ``name`` and ``command`` itself.
    """

    pid: int
    """The process id, as code inside sees it. In a machine it is not reused while the session is
    open, until the kernel has used all of them."""
    parent: int
    """The process id of its parent; 1 if that has ended, 0 for the first process of a command."""
    name: str
    """The name of the program; at most 15 bytes."""
    command: tuple[str, ...]
    """The program and its arguments; cut after 4 KiB."""
    started_at: float
    """Seconds since the epoch."""
    cpu_s: float
    """Seconds of CPU time."""
    memory_bytes: int
    """Resident memory."""
    left_behind: bool
    """Whether the command that started it has ended; always False in a context."""
