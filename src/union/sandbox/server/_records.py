"""What a console can be shown of runs: a look over the client's shoulder, and never in its way.

A record copies the end of a run's output, what was decided about its connections, and how it
ended. It takes part in nothing: it holds no lease, acknowledges nothing and slows nobody. What the
client is owed is kept elsewhere (``_runs.py``); when an observer is too slow, it is the observer
that misses something, and it is told how much.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.events import Exited, Failed
from union.sandbox._wire.frames import parse_json

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from union.sandbox._core.events import Started, Usage
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.decision import Decision

__all__ = ["History", "RunRecord", "SessionRecord", "Tail"]

TAIL_BYTES: Final = 64 * 1024
"""Of one run, both streams together; a quarter more before some of it is dropped."""
ENDED_BYTES: Final = 8 * 1024 * 1024
"""Of all runs that have ended, together: then the oldest are forgotten."""
ENDED_MOST: Final = 1000
DECISIONS_MOST: Final = 200
"""Of one session."""
_SMALL: Final = 4096
_PIECE_COST: Final = 128
_RECORD_COST: Final = 2048
_MOST_COMMAND: Final = 400
_MOST_WORDS: Final = 32


class Tail:
    """The last bytes of both streams, in the order in which they came."""

    def __init__(self, most: int = TAIL_BYTES) -> None:
        self.end = 0
        """How many bytes there ever were."""
        self._most = most
        self._bytes = 0
        self._pieces: deque[tuple[int, bytes | bytearray | memoryview]] = deque()

    @property
    def held(self) -> int:
        """What is kept; a piece costs something by itself."""
        return self._bytes + _PIECE_COST * len(self._pieces)

    def append(self, fd: int, data: bytes) -> None:
        self.end += len(data)
        kept: bytes | memoryview = data
        if len(data) > self._most:
            # A view: whoever writes this much has the next piece ready, which takes its place.
            kept = memoryview(data)[-self._most :]
            self._pieces.clear()
            self._bytes = 0
        self._bytes += len(kept)
        last_fd, last = self._pieces[-1] if self._pieces else (0, b"")
        if last_fd == fd and isinstance(last, bytearray) and len(last) < _SMALL:
            last += kept
        else:
            self._pieces.append((fd, bytearray(kept) if len(kept) < _SMALL else kept))
        # Not for every line: what is dropped at once is a quarter.
        if self.held > self._most * 5 // 4:
            while self.held > self._most:
                self._drop(self.held - self._most)

    def _drop(self, most: int) -> None:
        """Drops ``most`` bytes of the oldest piece, or the whole of it."""
        fd, first = self._pieces[0]
        if most < len(first):
            self._pieces[0] = (fd, bytes(first[most:]))
            self._bytes -= most
        else:
            self._pieces.popleft()
            self._bytes -= len(first)

    def settle(self) -> None:
        """Nothing follows for now: what is not part of the tail is let go."""
        for index, (fd, piece) in enumerate(self._pieces):
            if isinstance(piece, memoryview):
                self._pieces[index] = (fd, bytes(piece))

    def since(self, offset: int) -> tuple[int, list[tuple[int, bytes]]]:
        """How many bytes behind ``offset`` are gone already, and the pieces that are not."""
        at = self.end - self._bytes
        skipped = max(0, at - offset)
        found = []
        for fd, piece in self._pieces:
            if at + len(piece) > offset:
                found.append((fd, bytes(piece[max(0, offset - at) :])))
            at += len(piece)
        return skipped, found


class RunRecord:
    """One run, as far as somebody who looks on needs to know it."""

    def __init__(self, spec: RunSpec) -> None:
        self.number = 0
        """Counts the runs of a session, from 1; the client's own numbers need not be unique."""
        self.kind = spec.kind
        self.command = _command(spec)
        self.network_mode = spec.network.mode
        self.timeout_s = spec.timeout_s
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.pid: int | None = None
        self.isolation: Isolation | None = None
        """What is enforced for this one, where that is not what the session says."""
        self.written = {fd: 0 for fd, m in ((1, spec.stdout), (2, spec.stderr)) if m != "devnull"}
        self.allowed = 0
        self.refused = 0
        self.tail = Tail()
        self.end: bytes | None = None
        """The last event, as the client gets it."""
        self.end_run: Callable[[str], None] | None = None
        """Ends it, while there is something to end."""
        self.session: SessionRecord | None = None
        self.watchers: set[asyncio.Event] = set()
        self._open = set(self.written)

    @property
    def is_over(self) -> bool:
        """It has ended, and its output too."""
        return self.end is not None and not self._open

    @property
    def held(self) -> int:
        return self.tail.held + len(self.end or b"") + _RECORD_COST

    # What a run tells.

    def started(self, event: Started, isolation: Isolation | None) -> None:
        self.pid = event.pid
        self.isolation = isolation

    def output(self, fd: int, data: bytes) -> None:
        self.written[fd] += len(data)
        self.tail.append(fd, data)
        self._wake()

    def end_of_output(self, fd: int) -> None:
        self._open.discard(fd)
        self.tail.settle()
        self._wake()

    def decision(self, decision: Decision) -> None:
        if decision.allowed:
            self.allowed += 1
        else:
            self.refused += 1
        if self.session is not None:
            self.session.decided(self.number, decision)

    def ended(self, event: bytes, how: Exited | Failed | None) -> None:
        """``how`` is None for a run that was refused."""
        self.end = event
        self.ended_at = time.time()
        self.tail.settle()
        self.end_run = None
        if not isinstance(how, Exited):
            self._open.clear()
        if self.session is not None:
            self.session.run_ended(self, how.usage if isinstance(how, Exited) else None)
        self._wake()

    def forsaken(self) -> None:
        """Its session is gone: nothing more will come."""
        self.end = self.end or b'{"failed":{"reason":"the session ended","code":"closed"}}'
        self.end_run = None
        self.session = None
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    def described(self) -> dict[str, Any]:
        return {
            "run": self.number,
            "kind": self.kind,
            "command": self.command,
            "network_mode": self.network_mode,
            "timeout_s": self.timeout_s,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "pid": self.pid,
            "isolation": None if self.isolation is None else self.isolation.to_dict(),
            "stdout_bytes": self.written.get(1),
            "stderr_bytes": self.written.get(2),
            "allowed": self.allowed,
            "refused": self.refused,
            "end": None if self.end is None else parse_json(self.end),
        }


class SessionRecord:
    """The runs of one session, those that ended lately among them."""

    def __init__(self, history: History) -> None:
        self.runs: dict[int, RunRecord] = {}
        self.decisions: deque[tuple[int, int, Decision]] = deque(maxlen=DECISIONS_MOST)
        """Each with its own number and its run's."""
        self.count = 0
        self.cpu_s = 0.0
        """Of the runs that have ended."""
        self.peak_bytes = 0
        """The most that one of them used."""
        self._numbers = itertools.count(1)
        self._decided = itertools.count(1)
        self._history = history

    def begin(self, record: RunRecord) -> None:
        record.number = next(self._numbers)
        record.session = self
        self.count += 1
        self.runs[record.number] = record

    def decided(self, run: int, decision: Decision) -> None:
        self.decisions.append((next(self._decided), run, decision))

    def run_ended(self, record: RunRecord, usage: Usage | None) -> None:
        if usage is not None:
            self.cpu_s += usage.cpu_s
            self.peak_bytes = max(
                self.peak_bytes, usage.peak_memory_bytes or 0, usage.max_rss_bytes
            )
        self._history.ended(record)

    @property
    def running(self) -> int:
        return sum(record.end is None for record in self.runs.values())

    def close(self) -> None:
        for record in self.runs.values():
            self._history.forget(record)
            record.forsaken()
        self.runs.clear()


class History:
    """Of all sessions together, how much is remembered of runs that have ended."""

    def __init__(self, most_bytes: int = ENDED_BYTES, most: int = ENDED_MOST) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._held = 0
        self._ended: OrderedDict[RunRecord, int] = OrderedDict()
        """The oldest first, each with what it was counted for."""

    def ended(self, record: RunRecord) -> None:
        # A little output may follow its end, up to a full tail: it is counted as one.
        cost = record.held if record.is_over else record.held + TAIL_BYTES
        self._ended[record] = cost
        self._held += cost
        while self._held > self._most_bytes or len(self._ended) > self._most:
            oldest = next(iter(self._ended))
            self.forget(oldest)
            if oldest.session is not None:
                oldest.session.runs.pop(oldest.number, None)

    def forget(self, record: RunRecord) -> None:
        self._held -= self._ended.pop(record, 0)


def _command(spec: RunSpec) -> str:
    """The beginning of what it runs; never its environment or its stdin."""
    if spec.kind == "argv":
        words = (shlex.quote(word[:_MOST_COMMAND]) for word in spec.argv[:_MOST_WORDS])
        text = " ".join(words)
    else:
        text = spec.text
    cut = text[:_MOST_COMMAND]
    shown = cut.encode("utf-8", "replace").decode()
    return shown + "…" if len(cut) < len(text) else shown
