"""Which errors a kill excuses: those that it can cause, in the sessions whose processes it hit."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from scripts.soaking.load import WrongError

from union import sandbox as sb

__all__ = ["Excuses", "Kill", "Target"]

LATER_S: Final = 5.0
"""A call that begins so long after a kill may still meet its effect: death takes a moment."""
ENGINE: Final = frozenset({"execution", "spawn-EPIPE", "spawn-ECONNRESET", "spawn-ECHILD"})
"""Codes of a command, or a session being opened, whose sandbox or launcher has died."""
WIRE: Final = frozenset({"connection", "session-lost"})
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
    """What can be hit of a session: its work dir here, or the endpoint of its server."""

    is_remote: bool
    place: str | None
    """None: a session that is being opened, whose work dir nobody knows yet."""

    def is_hit(self, kill: Kill) -> bool:
        """Whether processes of this session were among those that died."""
        if self.is_remote:
            return kill.role.startswith(SERVER) and kill.hit == self.place
        if kill.role.startswith(SERVER):
            return False
        return None in (kill.hit, self.place) or kill.hit == self.place


class Excuses:
    """The kills of late, and what they excuse."""

    def __init__(self) -> None:
        self._kills: deque[Kill] = deque(maxlen=KEPT)
        self.used: Counter[str] = Counter()

    def add(self, kill: Kill) -> None:
        """A process was killed."""
        self._kills.append(kill)

    def excuses(self, exc: Exception, target: Target, begun: float) -> bool:
        """Whether an error of a call that began then is the effect of a kill; counts it if so."""
        hits = {kill.role for kill in self._kills if target.is_hit(kill) and _in_time(kill, begun)}
        if isinstance(exc, sb.SandboxError):
            name = f"{type(exc).__name__} {exc.code}"
            caused = any(exc.code in CAUSED[role] for role in hits)
        else:
            # What was killed had just become the command: then this is how the command ended.
            name = "command killed"
            caused = isinstance(exc, WrongError) and exc.is_killed and not hits.isdisjoint(SANDBOX)
        if caused:
            self.used[name] += 1
        return caused


def _in_time(kill: Kill, begun: float) -> bool:
    """A server that was killed stays away from its endpoint; everything else is made anew."""
    return kill.role == SERVER or kill.at > begun - LATER_S
