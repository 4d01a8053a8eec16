"""Who may use how much of a server: commands at once, bytes, frames.

Every limit of a server is shared by its sessions, and a session by the keys that may use it. What
one of them cannot have is refused as ``busy``, for that one run or request and for no other.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from union.sandbox._wire.values import MAX_START
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    from union.sandbox.server._auth import Grant

__all__ = [
    "ByteBudget",
    "Charge",
    "FrameBudget",
    "FrameBudgets",
    "RequestBytes",
    "RunSlots",
    "busy",
]

_FRAMES_PER_S: Final = 50_000.0
_FRAMES_AT_ONCE: Final = 50_000.0


def busy(message: str, code: str = "busy") -> SandboxExecutionError:
    """Nothing is wrong with the run: it can be sent again later."""
    return SandboxExecutionError(
        message, stage="transport", code=code, hint="try again later, or use another server"
    )


class RunSlots:
    """The commands that may run at once, ``--max-runs``, and the share of every session.

    Each of the sessions that there may be has a guaranteed number of slots; together they are at
    most half of all. The other half goes to whichever session asks first. Keys that are limited to
    a session use at most half of what their session may have.
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
        """The most that one session can have, when nothing else runs."""
        return self.total - self._reserve

    def check(self, session: str, *, is_limited: bool) -> None:
        """Check that there is a slot.

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
                    f"({self.total}) are kept for other sessions"
                )

    def take(self, session: str, *, is_limited: bool) -> None:
        """Take a slot; raises as ``check`` does."""
        self.check(session, is_limited=is_limited)
        if self._of_session[session] < self.guaranteed:
            self._used_of_guarantees += 1
        self._of_session[session] += 1
        self._limited[session] += is_limited
        self._used += 1

    def give(self, session: str, *, is_limited: bool) -> None:
        """Give a slot back."""
        self._used -= 1
        self._of_session[session] -= 1
        self._limited[session] -= is_limited
        if self._of_session[session] < self.guaranteed:
            self._used_of_guarantees -= 1
        if not self._of_session[session]:
            del self._of_session[session]
            del self._limited[session]


class ByteBudget:
    """A number of bytes that can be held at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Charge:
    """Bytes that one request or run holds, counted in several budgets at once."""

    __slots__ = ("_budgets", "size")

    def __init__(self, *budgets: ByteBudget) -> None:
        self._budgets = budgets
        self.size = 0

    def grow(self, size: int) -> None:
        """Hold ``size`` bytes more.

        Raises:
            SandboxExecutionError: code ``busy``; one of the budgets has no room for them.

        """
        for budget in self._budgets:
            if budget.held + size > budget.limit:
                raise busy(
                    f"requests that are being read hold {budget.held} bytes (limit {budget.limit})"
                )
        for budget in self._budgets:
            budget.held += size
        self.size += size

    def release(self) -> None:
        """Give everything back; may be called again."""
        for budget in self._budgets:
            budget.held -= self.size
        self.size = 0


class RequestBytes:
    """What requests and descriptions of runs may hold in memory, all together and per session.

    One description may take ``MAX_START`` bytes. Every level has room for at least one of them
    beside those of keys with fewer rights, so that such a key cannot keep out the owner.
    """

    def __init__(self, buffer_bytes: int, sessions: int) -> None:
        total = max(buffer_bytes, 4 * MAX_START)
        self._session_limit = total if sessions == 1 else max(total // 4, 2 * MAX_START)
        self.all = ByteBudget(total)
        self._limited = ByteBudget(total // 2)

    def for_session(self) -> tuple[ByteBudget, ByteBudget]:
        """The budgets of one session: of all its keys, and of those with fewer rights."""
        return ByteBudget(self._session_limit), ByteBudget(self._session_limit // 2)

    def charge(self, grant: Grant, session: tuple[ByteBudget, ByteBudget] | None) -> Charge:
        """An empty charge for a request that ``grant`` allows, in a session or outside of one."""
        budgets = [self.all]
        if session is not None:
            budgets.append(session[0])
        if not grant.is_full:
            budgets.append(self._limited)
            if session is not None:
                budgets.append(session[1])
        return Charge(*budgets)


class FrameBudget:
    """How many frames a key may send: a rate, and what may come at once."""

    def __init__(self) -> None:
        self._left = _FRAMES_AT_ONCE
        self._at = time.monotonic()

    def spend(self, frames: int) -> float:
        """Count frames that were read; return how long to wait before the next is read."""
        now = time.monotonic()
        self._left = min(_FRAMES_AT_ONCE, self._left + (now - self._at) * _FRAMES_PER_S) - frames
        self._at = now
        return 0.0 if self._left >= 0 else -self._left / _FRAMES_PER_S


class FrameBudgets:
    """One budget for each key, as long as one of its connections exists."""

    def __init__(self) -> None:
        self._by_key: WeakValueDictionary[str, FrameBudget] = WeakValueDictionary()

    def of(self, key: str) -> FrameBudget:
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = FrameBudget()
        return found
