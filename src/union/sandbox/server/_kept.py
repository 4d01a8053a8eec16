"""The runs that a session keeps: until their clients have everything, or there are too many."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

from union.sandbox.server._runs import Buffers
from union.sandbox.server._shares import busy

if TYPE_CHECKING:
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._runs import ServerRun
    from union.sandbox.server._sessions import Sessions

__all__ = ["KeptRuns", "RunTable"]

_RUNS_KEPT: Final = 4
"""Of a session, in multiples of what may run at once on the server."""
_MIN_HARD_LIMIT: Final = 64 * 1024 * 1024


class RunTable(dict[int, "ServerRun"]):
    """The runs of one session by number, with the share of each key."""

    def __init__(self, owner: Sessions, session: str) -> None:
        super().__init__()
        self._owner = owner
        self._session = session
        self._most = _RUNS_KEPT * owner.config.max_runs
        self._by_key: Counter[str] = Counter()
        self._limited = 0
        everything = owner.buffers
        share = everything.most // (1 if owner.config.max_sessions == 1 else 4)
        self._buffers = Buffers(share, everything)
        self._limited_buffers = Buffers(share // 2, self._buffers)

    def buffers_of(self, grant: Grant) -> Buffers:
        """Where the output of a run of this key is counted."""
        return self._buffers if grant.is_full else self._limited_buffers

    def add(self, run: ServerRun) -> None:
        self[run.number] = run
        self._by_key[run.grant.key] += 1
        self._limited += not run.grant.is_full

    def discard(self, run: ServerRun) -> None:
        """Forget a run and what it keeps; does nothing if it is not here."""
        if self.get(run.number) is not run:
            return
        del self[run.number]
        key = run.grant.key
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]
        self._limited -= not run.grant.is_full
        run.let_go()

    def check_room(self, grant: Grant) -> None:
        """Check that this key can have one more run.

        Raises:
            SandboxExecutionError: code ``busy``.

        """
        if len(self) >= self._most:
            raise busy(f"limit of runs that the session keeps reached ({self._most})")
        if not grant.is_full:
            mine, all_limited = max(1, self._most // 4), max(1, self._most // 2)
            if self._by_key[grant.key] >= mine or self._limited >= all_limited:
                raise busy(f"limit of runs that are kept for this key reached ({mine})")
            _check_unread(self._limited_buffers)
        self._owner.slots.check(self._session, is_limited=not grant.is_full)
        # A session within its share is not refused for what the others keep.
        if self._buffers.held >= self._buffers.most:
            _check_unread(self._owner.buffers)


def _check_unread(buffers: Buffers) -> None:
    limit = max(2 * buffers.most, _MIN_HARD_LIMIT)
    if buffers.held >= limit:
        raise busy(f"unread output of other runs takes {buffers.held} bytes (limit {limit})")


class KeptRuns:
    """Runs with an idempotency key that have ended, whose output can be asked for again.

    When they keep too much, the oldest lose their output. That they were run stays known, so that
    the same request is answered with an error and never runs a second time.
    """

    def __init__(self, most: int, most_of_session: int) -> None:
        self._most = most
        self._most_of_session = most_of_session
        self._held = 0
        self._of_session: Counter[str] = Counter()
        self._runs: OrderedDict[ServerRun, tuple[str, int]] = OrderedDict()
        """The oldest first."""

    def add(self, run: ServerRun, session: str) -> None:
        self.remove(run)
        size = run.log.held
        self._runs[run] = (session, size)
        self._held += size
        self._of_session[session] += size
        run.on_release = self.remove
        while self._held > self._most:
            self._drop(next(iter(self._runs)))
        while self._of_session[session] > self._most_of_session:
            self._drop(next(found for found, (name, _) in self._runs.items() if name == session))

    def remove(self, run: ServerRun) -> None:
        """The run is in use again, or forgotten."""
        session, size = self._runs.pop(run, ("", 0))
        self._held -= size
        self._of_session[session] -= size
        if not self._of_session[session]:
            del self._of_session[session]

    def _drop(self, run: ServerRun) -> None:
        self.remove(run)
        run.drop_output()
