"""Records of runs for the console.

A record copies the last output of a run, the decisions about its connections, and its end. It has
no effect on the run: it renews no lease, acknowledges no output and applies no back-pressure. The
output for the client is kept in ``_runs.py``. An observer that is too slow misses output, and gets
the number of skipped bytes.
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
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["History", "RunRecord", "SessionRecord", "Tail"]

TAIL_BYTES: Final = 64 * 1024
"""Output kept per run, both streams together; it may exceed this by a quarter."""
MAX_ENDED_BYTES: Final = 8 * 1024 * 1024
"""Memory for all ended runs; beyond it, the oldest records are removed."""
MAX_ENDED: Final = 1000
MAX_DECISIONS: Final = 200
MAX_CHECKPOINT_EVENTS: Final = 200
"""Decisions kept per session."""
_SMALL: Final = 4096
_PIECE_COST: Final = 128
_RECORD_COST: Final = 2048
_MAX_COMMAND_CHARS: Final = 400
_MAX_ARGUMENTS: Final = 32


class Tail:
    """The last bytes of both streams, in order of arrival."""

    def __init__(self, max_bytes: int = TAIL_BYTES) -> None:
        self.end = 0
        """Number of bytes since the start."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pieces: deque[tuple[int, bytes | bytearray | memoryview]] = deque()

    @property
    def held(self) -> int:
        """Memory in use, with a fixed cost for each piece."""
        return self._bytes + _PIECE_COST * len(self._pieces)

    def append(self, fd: int, data: bytes) -> None:
        self.end += len(data)
        kept: bytes | memoryview = data
        if len(data) > self._max_bytes:
            # A view saves the copy: after a large piece, the next one usually replaces it soon.
            kept = memoryview(data)[-self._max_bytes :]
            self._pieces.clear()
            self._bytes = 0
        self._bytes += len(kept)
        last_fd, last = self._pieces[-1] if self._pieces else (0, b"")
        if last_fd == fd and isinstance(last, bytearray) and len(last) < _SMALL:
            last += kept
        else:
            self._pieces.append((fd, bytearray(kept) if len(kept) < _SMALL else kept))
        # A quarter is dropped at once, so that not every line causes work.
        if self.held > self._max_bytes * 5 // 4:
            while self.held > self._max_bytes:
                self._drop(self.held - self._max_bytes)

    def _drop(self, count: int) -> None:
        """Drop ``count`` bytes of the oldest piece, or all of it."""
        fd, first = self._pieces[0]
        if count < len(first):
            self._pieces[0] = (fd, bytes(first[count:]))
            self._bytes -= count
        else:
            self._pieces.popleft()
            self._bytes -= len(first)

    def compact(self) -> None:
        """Copy the views, so that the large pieces behind them can be freed."""
        for index, (fd, piece) in enumerate(self._pieces):
            if isinstance(piece, memoryview):
                self._pieces[index] = (fd, bytes(piece))

    def since(self, offset: int) -> tuple[int, list[tuple[int, bytes]]]:
        """Return how many bytes after ``offset`` were dropped, and the pieces that follow them."""
        at = self.end - self._bytes
        skipped = max(0, at - offset)
        found = []
        for fd, piece in self._pieces:
            if at + len(piece) > offset:
                found.append((fd, bytes(piece[max(0, offset - at) :])))
            at += len(piece)
        return skipped, found


class RunRecord:
    """One run, as the console shows it."""

    def __init__(self, spec: RunSpec) -> None:
        self.number = 0
        """Number within the session, from 1; numbers of clients need not be unique."""
        self.kind: str = spec.kind
        self.command = _command(spec)
        self.network_mode = spec.network.mode
        self.timeout_s = spec.timeout_s
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.pid: int | None = None
        self.isolation: Isolation | None = None
        """Isolation of this run, if it differs from that of the session."""
        self.written = {fd: 0 for fd, m in ((1, spec.stdout), (2, spec.stderr)) if m != "devnull"}
        self.allowed = 0
        self.refused = 0
        self.tail = Tail()
        self.end: bytes | None = None
        """The last event, as the client receives it."""
        self.end_run: Callable[[str], None] | None = None
        """Ends the run; None after its end."""
        self.session: SessionRecord | None = None
        self.watchers: set[asyncio.Event] = set()
        self._open = set(self.written)
        self.code = ""
        """The source of a cell."""
        self.shown: list[tuple[int, dict[str, Any]]] = []
        """Results of a cell, each with the amount of output before it."""

    @property
    def is_over(self) -> bool:
        """Whether the command and its output have ended."""
        return self.end is not None and not self._open

    @property
    def held(self) -> int:
        return self.tail.held + len(self.end or b"") + _RECORD_COST

    # Events of the run.

    def started(self, event: Started, isolation: Isolation | None) -> None:
        self.pid = event.pid
        self.isolation = isolation

    def output(self, fd: int, data: bytes) -> None:
        self.written[fd] += len(data)
        self.tail.append(fd, data)
        self._wake()

    def end_of_output(self, fd: int) -> None:
        self._open.discard(fd)
        self.tail.compact()
        self._wake()

    def decision(self, decision: Decision) -> None:
        if decision.allowed:
            self.allowed += 1
        else:
            self.refused += 1
        if self.session is not None:
            self.session.decided(self.number, decision)

    def request(self, request: HttpRequest) -> None:
        if self.session is not None:
            self.session.requested(self.number, request)

    def ended(self, event: bytes, how: Exited | Failed | None) -> None:
        """Record the end of the run; ``how`` is None if it was refused."""
        self.end = event
        self.ended_at = time.time()
        self.tail.compact()
        self.end_run = None
        if not isinstance(how, Exited):
            self._open.clear()
        if self.session is not None:
            self.session.run_ended(self, how.usage if isinstance(how, Exited) else None)
        self._wake()

    def session_ended(self) -> None:
        """Record that the session has ended."""
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
    """The current and latest runs of one session."""

    def __init__(self, history: History) -> None:
        self.runs: dict[int, RunRecord] = {}
        self.decisions: deque[tuple[int, int, Decision]] = deque(maxlen=MAX_DECISIONS)
        """Each with its own number and the number of its run."""
        self.requests: deque[tuple[int, int, HttpRequest]] = deque(maxlen=MAX_DECISIONS)
        self.checkpoints: deque[tuple[float, str, str, str]] = deque(maxlen=MAX_CHECKPOINT_EVENTS)
        """What was done with checkpoints: time, action, id and name."""
        self.count = 0
        self.cpu_s = 0.0
        """CPU time of the ended runs."""
        self.peak_bytes = 0
        """Peak memory of one run, the largest of all."""
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

    def requested(self, run: int, request: HttpRequest) -> None:
        self.requests.append((next(self._decided), run, request))

    def checkpoint(self, action: str, checkpoint_id: str, name: str) -> None:
        """Record a call about a checkpoint."""
        self.checkpoints.append((time.time(), action, checkpoint_id[:64], name))

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
            record.session_ended()
        self.runs.clear()


class History:
    """Limits the records of ended runs of all sessions."""

    def __init__(self, max_bytes: int = MAX_ENDED_BYTES, max_records: int = MAX_ENDED) -> None:
        self._max_bytes = max_bytes
        self._max_records = max_records
        self._held = 0
        self._ended: OrderedDict[RunRecord, int] = OrderedDict()
        """Oldest first, each with the memory that was counted for it."""

    def ended(self, record: RunRecord) -> None:
        # Output may follow the end of the command, up to a full tail, which is counted in advance.
        cost = record.held if record.is_over else record.held + TAIL_BYTES
        self._ended[record] = cost
        self._held += cost
        while self._held > self._max_bytes or len(self._ended) > self._max_records:
            oldest = next(iter(self._ended))
            self.forget(oldest)
            if oldest.session is not None:
                oldest.session.runs.pop(oldest.number, None)

    def forget(self, record: RunRecord) -> None:
        self._held -= self._ended.pop(record, 0)


def _command(spec: RunSpec) -> str:
    """Return the beginning of the command, without its environment and stdin."""
    if spec.kind == "argv":
        words = (shlex.quote(word[:_MAX_COMMAND_CHARS]) for word in spec.argv[:_MAX_ARGUMENTS])
        text = " ".join(words)
    else:
        text = spec.text
    cut = text[:_MAX_COMMAND_CHARS]
    shown = cut.encode("utf-8", "replace").decode()
    return shown + "…" if len(cut) < len(text) else shown
