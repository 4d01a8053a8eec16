"""Keeps account of what a run asked for, was given, and was refused."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from union.sandbox._policy.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._policy.decision import FrontendName
    from union.sandbox._policy.rules import Verdict

__all__ = ["Attempt", "Ledger"]

_LOGGER: Final = logging.getLogger("union.sandbox.network")
_MAX_LOG_LINES: Final = 1000
"""Log lines about refusals in one run: the program inside must not fill the host's disk."""
_MAX_DECISIONS: Final = 10_000
"""Decisions of one run that are handed on: the owner keeps them, and must not run out of memory."""
_MAX_HOST_CHARS: Final = 255


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One connection while it lasts; becomes a Decision when it ends."""

    frontend: FrontendName
    host: str
    port: int
    requested_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    address: str = ""
    verdict: Verdict | None = None
    error: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    server_names: tuple[str, ...] = ()
    """TLS server names that were judged on this connection."""
    is_revoked: bool = False
    """The policy changed and no longer allows it: no further byte is carried."""

    def check_not_revoked(self) -> None:
        """Raise ``ConnectionResetError`` once the policy no longer allows this connection."""
        if self.is_revoked:
            raise ConnectionResetError(errno.ECONNRESET, "the network policy changed")


class Ledger:
    """Turns attempts into decisions: one call to the owner each, one log line per refusal."""

    def __init__(self, on_decision: Callable[[Decision], None]) -> None:
        self._on_decision = on_decision
        self._lines = 0
        self._recorded = 0
        self.unrecorded = 0

    def renew(self) -> None:
        """Start counting anew: the limits are those of one policy, not of the egress's life."""
        self._lines = 0
        self._recorded = 0

    def close(self, attempt: Attempt) -> None:
        """Account for an attempt that has ended; one that was never judged leaves no trace."""
        verdict = attempt.verdict
        if verdict is None:
            return
        decision = Decision(
            time=attempt.requested_at,
            door=attempt.frontend,
            host=_printable(attempt.host),
            address=attempt.address,
            port=attempt.port,
            allowed=verdict.allowed,
            rule=verdict.rule,
            reason=verdict.reason,
            suggestion=verdict.suggestion,
            error=attempt.error,
            bytes_up=attempt.bytes_up,
            bytes_down=attempt.bytes_down,
            duration_ms=(time.monotonic() - attempt.started) * 1000,
        )
        if not decision.allowed:
            self._log(decision)
        if self._recorded >= _MAX_DECISIONS:
            self.unrecorded += 1
            return
        self._recorded += 1
        self._on_decision(decision)

    def _log(self, decision: Decision) -> None:
        self._lines += 1
        if self._lines > _MAX_LOG_LINES + 1:
            return
        if self._lines > _MAX_LOG_LINES:
            _LOGGER.warning("more than %d refusals in this run; not logging more", _MAX_LOG_LINES)
            return
        _LOGGER.warning(
            "refused %s to %s port %d: %s%s",
            decision.door,
            decision.host or "(no host)",
            decision.port,
            decision.reason,
            f" (entry that would allow it: {decision.suggestion})" if decision.suggestion else "",
        )


def _printable(host: str) -> str:
    # What the program inside wrote ends up in logs and terminals.
    text = host if host.isascii() and host.isprintable() else ascii(host)
    return text[:_MAX_HOST_CHARS]
