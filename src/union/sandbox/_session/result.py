"""ExecResult: what a one-shot call returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from union.sandbox._core.events import Usage

if TYPE_CHECKING:
    from union.sandbox._core.literals import TerminationReason
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["ExecResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The exit code, output and resource usage of a command that has ended."""

    returncode: int
    """The exit code; 128+N if signal N ended the command."""
    stdout: str
    """Collected output, decoded as UTF-8; invalid bytes are replaced."""
    stderr: str
    """Collected errors, decoded as UTF-8; invalid bytes are replaced."""
    termination_reason: TerminationReason = ""
    """Empty after an exit; else ``signal``, ``timeout``, ``oom``, ``limit`` or ``closed``."""
    runtime_ms: float = 0.0
    """Wall-clock time in milliseconds."""
    truncated: bool = False
    """Whether output was cut at ``max_output_bytes``."""
    usage: Usage = field(default_factory=Usage)
    """CPU time and memory of the command and its children."""
    backend: str = ""
    """The backend that isolated the command."""
    network: tuple[Decision, ...] = ()
    """The network policy decisions for the command, in order."""
    requests: tuple[HttpRequest, ...] = ()
    """The HTTP requests of the command to hosts of ``Http`` entries, in order."""

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.returncode == 0

    @property
    def exit_code(self) -> int:
        """The same as ``returncode``."""
        return self.returncode
