"""Errors that a kill explains: those that it can cause, in the sessions whose processes it hit."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from scripts.soaking.load import WrongError

from union import sandbox as sb

__all__ = ["Excuses", "Kill", "Target"]

LATER_S: Final = 20.0
"""A call that starts within this time after a kill may still fail because of it."""
ENGINE: Final = frozenset(
    {
        "context-lost",
        "context-start",
        "execution",
        "spawn-ECHILD",
        "spawn-ECONNRESET",
        "spawn-EPIPE",
    }
)
"""Codes of a command, a context, or an opening session, whose sandbox or launcher has died."""
WIRE: Final = frozenset({"connection", "context-lost", "session-lost"})
"""Codes of a call whose server has died."""
SANDBOX: Final = ("spare", "waiting python", "first process", "bwrap")
SERVER: Final = "server"
CAUSED: Final = {
    "launcher": ENGINE,
    "server's launcher": ENGINE,
    SERVER: WIRE,
    **dict.fromkeys(SANDBOX, ENGINE),
}
KEPT: Final = 1000


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. ``hit`` is the work dir or the endpoint whose processes died; None: all local."""

    role: str
    at: float
    hit: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a session that a kill can hit: its local work dir, or its server's endpoint."""

    is_remote: bool
    place: str | None
    """None: a session that is opening and has no work dir yet."""

    def is_hit(self, kill: Kill) -> bool:
        """Return whether the kill hit processes of this session."""
        if self.is_remote:
            return kill.role.startswith(SERVER) and kill.hit == self.place
        if kill.role.startswith(SERVER):
            return False
        return None in (kill.hit, self.place) or kill.hit == self.place


class Excuses:
    """The recent kills, and the errors that they explain."""

    def __init__(self) -> None:
        self._kills: deque[Kill] = deque(maxlen=KEPT)
        self.used: Counter[str] = Counter()

    def add(self, kill: Kill) -> None:
        """Record a kill."""
        self._kills.append(kill)

    def excuses(self, exc: Exception, target: Target, begun: float) -> bool:
        """Return whether a kill explains an error of a call that started at ``begun``; count it."""
        hits = {kill.role for kill in self._kills if target.is_hit(kill) and _in_time(kill, begun)}
        if isinstance(exc, sb.SandboxError):
            name = f"{type(exc).__name__} {exc.code}"
            caused = any(exc.code in CAUSED[role] for role in hits)
        else:
            # The killed process had just become the command, so the command ended by SIGKILL.
            name = "command killed"
            caused = isinstance(exc, WrongError) and exc.is_killed and not hits.isdisjoint(SANDBOX)
            if isinstance(exc, WrongError) and exc.is_lost:
                name = "interpreter killed"
                caused = not hits.isdisjoint(CAUSED.keys() - {SERVER})
        if caused:
            self.used[name] += 1
        return caused


def _in_time(kill: Kill, begun: float) -> bool:
    """A killed server never returns to its endpoint; everything else is created again."""
    return kill.role == SERVER or kill.at > begun - LATER_S
