"""The runs that a session keeps until their clients have received everything."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

from union.sandbox.server._quotas import Buffers, busy

if TYPE_CHECKING:
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import Sessions

__all__ = ["KeptRuns", "RunTable"]

_KEPT_PER_SLOT: Final = 4
"""Limit of kept runs of a session, as a multiple of ``--max-runs``."""
_MIN_HARD_LIMIT: Final = 64 * 1024 * 1024


class RunTable(dict[int, "ServerRun"]):
    """The runs of one session by number, with limits for each key."""

    def __init__(self, owner: Sessions, session: str) -> None:
        super().__init__()
        self._owner = owner
        self._session = session
        self._max_runs = _KEPT_PER_SLOT * owner.config.max_runs
        self._by_key: Counter[str] = Counter()
        self._limited = 0
        everything = owner.buffers
        share = everything.limit // (1 if owner.config.max_sessions == 1 else 4)
        self._buffers = Buffers(share, everything)
        self._limited_buffers = Buffers(share // 2, self._buffers)

    def buffers_of(self, grant: Grant) -> Buffers:
        """Return the buffers that count the output of a run of this key."""
        return self._buffers if grant.is_full else self._limited_buffers

    def add(self, run: ServerRun) -> None:
        self[run.number] = run
        self._by_key[run.grant.key] += 1
        self._limited += not run.grant.is_full

    def discard(self, run: ServerRun) -> None:
        """Remove a run and release its output; do nothing if the table does not hold it."""
        if self.get(run.number) is not run:
            return
        del self[run.number]
        key = run.grant.key
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]
        self._limited -= not run.grant.is_full
        run.release()

    def check_room(self, grant: Grant, *, needs_slot: bool = True) -> None:
        """Check that this key can start one more run.

        Args:
            grant: the rights of the key.
            needs_slot: whether the run starts a process tree; a cell runs in that of its context.

        Raises:
            SandboxExecutionError: code ``busy``.

        """
        if len(self) >= self._max_runs:
            raise busy(f"limit of kept runs of the session reached ({self._max_runs})")
        if not grant.is_full:
            mine, all_limited = max(1, self._max_runs // 4), max(1, self._max_runs // 2)
            if self._by_key[grant.key] >= mine or self._limited >= all_limited:
                raise busy(f"limit of kept runs of this key reached ({mine})")
            _check_unread_output(self._limited_buffers)
        if needs_slot:
            self._owner.slots.check(self._session, is_limited=not grant.is_full)
        # A session within its share is not refused because of the output of other sessions.
        if self._buffers.held >= self._buffers.limit:
            _check_unread_output(self._owner.buffers)


def _check_unread_output(buffers: Buffers) -> None:
    limit = max(2 * buffers.limit, _MIN_HARD_LIMIT)
    if buffers.held >= limit:
        raise busy(f"limit of unread output reached ({buffers.held} of {limit} bytes)")


class KeptRuns:
    """Ended runs with an idempotency key, whose output a repeated request can get.

    When they hold too much output, the oldest lose theirs. The run itself stays known, so that a
    repeated request gets an error and never runs a second time.
    """

    def __init__(self, max_bytes: int, max_bytes_per_session: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_session = max_bytes_per_session
        self._held = 0
        self._of_session: Counter[str] = Counter()
        self._runs: OrderedDict[ServerRun, tuple[str, int]] = OrderedDict()
        """Oldest first."""

    def add(self, run: ServerRun, session: str) -> None:
        """Keep an ended run; drop the output of older ones if the limits are exceeded."""
        self.remove(run)
        size = run.log.held
        self._runs[run] = (session, size)
        self._held += size
        self._of_session[session] += size
        run.on_release = self.remove
        while self._held > self._max_bytes:
            self._drop(next(iter(self._runs)))
        while self._of_session[session] > self._max_bytes_per_session:
            self._drop(next(found for found, (name, _) in self._runs.items() if name == session))

    def remove(self, run: ServerRun) -> None:
        """Stop counting a run that is attached again or forgotten."""
        session, size = self._runs.pop(run, ("", 0))
        self._held -= size
        self._of_session[session] -= size
        if not self._of_session[session]:
            del self._of_session[session]

    def _drop(self, run: ServerRun) -> None:
        self.remove(run)
        run.drop_output()
