"""Quotas of sessions and keys: running commands, bytes of requests, kept output, frames.

The sessions share the limits of the server, and the keys of a session share those of the session. A
run or request over its quota is refused with the code ``busy``; others are not affected.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from union.sandbox._wire.frames import WINDOW
from union.sandbox._wire.values import MAX_START
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    from union.sandbox._wire.run_log import StreamLog
    from union.sandbox.server._auth import Grant

__all__ = [
    "MIN_STREAM_BYTES",
    "Buffers",
    "ByteBudget",
    "Charge",
    "FrameBudget",
    "FrameBudgets",
    "RequestBytes",
    "RunSlots",
    "busy",
]

MIN_STREAM_BYTES: Final = WINDOW // 8
"""Output that every stream may keep, even if the shared limits are reached."""
_FRAMES_PER_S: Final = 50_000.0
_FRAME_BURST: Final = 50_000.0


def busy(message: str, code: str = "busy") -> SandboxExecutionError:
    """Return the error for a quota that is used up; the request can be repeated later."""
    return SandboxExecutionError(
        message, stage="transport", code=code, hint="retry later, or use another server"
    )


class RunSlots:
    """The slots for running commands (``--max-runs``), and the share of every session.

    Every possible session has a guaranteed number of slots; together these are at most half of all
    slots. The other half is allocated on demand. Keys that are limited to a session use at most
    half of the slots of their session.
    """

    def __init__(self, total: int, sessions: int) -> None:
        self.total = total
        self.guaranteed = max(1, total // (2 * sessions))
        self._reserve = min(total // 2, (sessions - 1) * self.guaranteed)
        self._of_session: Counter[str] = Counter()
        self._limited: Counter[str] = Counter()
        self._used = 0
        self._used_of_guarantees = 0

    @property
    def per_session(self) -> int:
        """Number of slots that one session can use when nothing else runs."""
        return self.total - self._reserve

    def check(self, session: str, *, is_limited: bool) -> None:
        """Check that a slot is free.

        Raises:
            SandboxExecutionError: code ``busy``; the message names the limit.

        """
        mine = self._of_session[session]
        if self._used >= self.total:
            raise busy(f"run limit of the server reached ({self.total})")
        if is_limited and self._limited[session] >= max(1, self.per_session // 2):
            raise busy(f"run limit of this key reached ({max(1, self.per_session // 2)})")
        if mine >= self.guaranteed:
            others = self._used_of_guarantees - min(mine, self.guaranteed)
            if self._used >= self.total - max(0, self._reserve - others):
                raise busy(
                    f"run limit of the session reached ({mine}); the other slots of the server "
                    f"({self.total}) are reserved for other sessions"
                )

    def acquire(self, session: str, *, is_limited: bool) -> None:
        """Allocate a slot; raise as ``check`` does."""
        self.check(session, is_limited=is_limited)
        if self._of_session[session] < self.guaranteed:
            self._used_of_guarantees += 1
        self._of_session[session] += 1
        self._limited[session] += is_limited
        self._used += 1

    def release(self, session: str, *, is_limited: bool) -> None:
        """Return a slot."""
        self._used -= 1
        self._of_session[session] -= 1
        self._limited[session] -= is_limited
        if self._of_session[session] < self.guaranteed:
            self._used_of_guarantees -= 1
        if not self._of_session[session]:
            del self._of_session[session]
            del self._limited[session]


class ByteBudget:
    """A limit of bytes that are held at the same time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Charge:
    """The bytes of one request or run, counted in several budgets."""

    __slots__ = ("_budgets", "size")

    def __init__(self, *budgets: ByteBudget) -> None:
        self._budgets = budgets
        self.size = 0

    def grow(self, size: int) -> None:
        """Add ``size`` bytes.

        Raises:
            SandboxExecutionError: code ``busy``; a budget is used up.

        """
        for budget in self._budgets:
            if budget.held + size > budget.limit:
                raise busy(
                    f"memory limit for requests reached ({budget.held} of {budget.limit} bytes)"
                )
        for budget in self._budgets:
            budget.held += size
        self.size += size

    def release(self) -> None:
        """Remove all bytes from the budgets; may be called more than once."""
        for budget in self._budgets:
            budget.held -= self.size
        self.size = 0


class RequestBytes:
    """Memory limits for requests and START frames, for the server and per session.

    One START may take ``MAX_START`` bytes. Every level reserves room for at least one START of the
    owner, which keys that are limited to a session cannot use.
    """

    def __init__(self, buffer_bytes: int, sessions: int) -> None:
        total = max(buffer_bytes, 4 * MAX_START)
        self._session_limit = total if sessions == 1 else max(total // 4, 2 * MAX_START)
        self.all = ByteBudget(total)
        self._limited = ByteBudget(total // 2)

    def for_session(self) -> tuple[ByteBudget, ByteBudget]:
        """Return the budgets of one session: for all keys, and for keys limited to the session."""
        return ByteBudget(self._session_limit), ByteBudget(self._session_limit // 2)

    def charge(self, grant: Grant, session: tuple[ByteBudget, ByteBudget] | None) -> Charge:
        """Return an empty charge for a request with this grant, in a session or outside of one."""
        budgets = [self.all]
        if session is not None:
            budgets.append(session[0])
        if not grant.is_full:
            budgets.append(self._limited)
            if session is not None:
                budgets.append(session[1])
        return Charge(*budgets)


class Buffers:
    """Counts kept output against a limit: of the server, of a session, or of limited keys."""

    def __init__(self, limit: int, parent: Buffers | None = None) -> None:
        self.limit = limit
        self.held = 0
        self.parent = parent

    def add(self, size: int) -> None:
        """Add ``size`` bytes (may be negative), here and in all parents."""
        level: Buffers | None = self
        while level is not None:
            level.held += size
            level = level.parent

    def is_full(self, stream: StreamLog) -> bool:
        """Return whether a stream must stop: its window is full, or a limit is reached."""
        if stream.held < MIN_STREAM_BYTES:
            return False
        level: Buffers | None = self
        while level is not None:
            if level.held >= level.limit:
                return True
            level = level.parent
        return stream.held >= WINDOW


class FrameBudget:
    """The rate limit for the frames of one key, with a burst."""

    def __init__(self) -> None:
        self._left = _FRAME_BURST
        self._at = time.monotonic()

    def spend(self, frames: int) -> float:
        """Count frames that were read; return the seconds to wait before the next read."""
        now = time.monotonic()
        self._left = min(_FRAME_BURST, self._left + (now - self._at) * _FRAMES_PER_S) - frames
        self._at = now
        return 0.0 if self._left >= 0 else -self._left / _FRAMES_PER_S


class FrameBudgets:
    """One frame budget for each key that has a connection."""

    def __init__(self) -> None:
        self._by_key: WeakValueDictionary[str, FrameBudget] = WeakValueDictionary()

    def of(self, key: str) -> FrameBudget:
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = FrameBudget()
        return found
