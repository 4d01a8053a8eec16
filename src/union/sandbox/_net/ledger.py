"""Record the connection attempts of a run, allowed and refused."""

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
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._policy.rules import Verdict

__all__ = ["Attempt", "Ledger"]

_LOGGER: Final = logging.getLogger("union.sandbox.network")
_MAX_LOG_LINES: Final = 1000
"""Limit on log lines about refusals per run: a sandbox must not fill the host's disk."""
_MAX_DECISIONS: Final = 10_000
"""Limit on recorded decisions per run: the owner keeps them in memory."""
_MAX_HOST_CHARS: Final = 255


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A connection attempt in progress; becomes a Decision when it ends."""

    frontend: FrontendName
    host: str
    port: int
    requested_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    address: str = ""
    verdict: Verdict | None = None
    verdict_by_name: Verdict | None = None
    """The verdict on the destination as the program wrote it, while it is being dialled."""
    error: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    server_names: tuple[str, ...] = ()
    """TLS server names that were allowed on this connection."""
    is_tunnel: bool = False
    """Bytes are forwarded both ways, so that forwarding can be suspended."""
    is_continued: bool = False
    """A part of this attempt was recorded before; the counters restarted then."""
    binding: Http | None = None
    """The entry that handles the connection; None if it is tunnelled or forwarded."""
    is_revoked: bool = False
    """The current policy no longer allows this attempt: no further byte is forwarded."""

    def check_not_revoked(self) -> None:
        """Raise ``ConnectionResetError`` once the policy no longer allows this connection."""
        if self.is_revoked:
            raise ConnectionResetError(errno.ECONNRESET, "the network policy changed")


class Ledger:
    """Report each ended attempt to the owner as a decision, and log refusals.

    Args:
        on_decision: called once per recorded decision.
        on_request: called once per recorded HTTP request. Default None: not recorded.

    """

    def __init__(
        self,
        on_decision: Callable[[Decision], None],
        on_request: Callable[[HttpRequest], None] | None = None,
    ) -> None:
        self._on_decision = on_decision
        self._on_request = on_request
        self._logged = 0
        self._recorded = 0
        self.unrecorded = 0

    def reset_limits(self) -> None:
        """Restart both counters: the limits apply per policy, not per lifetime of the egress."""
        self._logged = 0
        self._recorded = 0

    def record_part(self, attempt: Attempt) -> None:
        """Record an attempt that continues, and restart its counters."""
        self.record(attempt)
        attempt.is_continued = True
        attempt.bytes_up = attempt.bytes_down = 0
        attempt.requested_at, attempt.started = time.time(), time.monotonic()

    def record(self, attempt: Attempt) -> None:
        """Record an attempt that has ended. Attempts without a verdict are not recorded."""
        verdict, error = attempt.verdict, attempt.error
        if verdict is None:
            verdict = attempt.verdict_by_name
            if verdict is None or not verdict.allowed:
                return
            error = error or "ended before it was connected"
        if attempt.is_continued and not (attempt.bytes_up or attempt.bytes_down or attempt.error):
            return  # unused since its last part was recorded
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
            error=error,
            bytes_up=attempt.bytes_up,
            bytes_down=attempt.bytes_down,
            duration_ms=(time.monotonic() - attempt.started) * 1000,
            intercepted=attempt.binding is not None,
        )
        if not decision.allowed:
            self._log(decision)
        if self._recorded >= _MAX_DECISIONS:
            self.unrecorded += 1
            return
        self._recorded += 1
        self._on_decision(decision)

    def record_request(self, request: HttpRequest) -> None:
        """Record an HTTP request that has ended, and log a refusal. Both have the same limits."""
        if not request.allowed:
            self._log_refusal(
                "refused %s %s to %s: %s",
                _printable(request.method),
                _printable(request.path),
                request.host,
                request.reason,
            )
        if self._recorded >= _MAX_DECISIONS:
            self.unrecorded += 1
            return
        self._recorded += 1
        if self._on_request is not None:
            self._on_request(request)

    def _log(self, decision: Decision) -> None:
        self._log_refusal(
            "refused %s to %s port %d: %s%s",
            decision.door,
            decision.host or "(no host)",
            decision.port,
            decision.reason,
            f" (entry that would allow it: {decision.suggestion})" if decision.suggestion else "",
        )

    def _log_refusal(self, text: str, *values: object) -> None:
        self._logged += 1
        if self._logged > _MAX_LOG_LINES + 1:
            return
        if self._logged > _MAX_LOG_LINES:
            _LOGGER.warning(
                "more than %d refusals in this run; further refusals are not logged", _MAX_LOG_LINES
            )
            return
        _LOGGER.warning(text, *values)


def _printable(host: str) -> str:
    # The sandboxed program chose this text, and it is shown in logs and terminals.
    text = host if host.isascii() and host.isprintable() else ascii(host)
    return text[:_MAX_HOST_CHARS]
