"""Steps of checkpoints: calls that change files or send a request to the launcher.

The interpreter reports a call before it makes it, in every thread. Requests to the launcher have
one more step, right after they were sent: the launcher works on them meanwhile.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from union.sandbox._linux.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = frozenset(
    {
        "fcntl.flock", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename",
        "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime", "socket.sendmsg",
    }
)  # fmt: skip
SENT = "sent"


class Steps:
    """Counts the steps of this process while it is armed, and acts at one of them."""

    def __init__(self, act: Callable[[], object]) -> None:
        """Count steps, and call ``act`` at the one that ``arm()`` names."""
        self._act = act
        self._at = 0
        self._is_armed = False
        self.seen: list[str] = []

    @property
    def has_acted(self) -> bool:
        return 0 < self._at <= len(self.seen)

    def arm(self, at: int) -> None:
        """Count from one; act right before the step ``at``, or never for 0."""
        self.seen, self._at, self._is_armed = [], at, True

    def disarm(self) -> None:
        self._is_armed = False

    def install(self) -> None:
        """Count from now on, for good: the interpreter keeps its hooks."""
        sys.addaudithook(self._on_event)
        prepare = Channel.prepare

        def counted(*args: Any, **options: Any) -> Any:
            made = prepare(*args, **options)
            self._step(SENT)
            return made

        Channel.prepare = counted  # type: ignore[method-assign]

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (
            event == "open" and isinstance(args[2], int) and args[2] & _WRITES
        ):
            self._step(event)

    def _step(self, name: str) -> None:
        if self._is_armed:
            self.seen.append(name)
            if len(self.seen) == self._at:
                self._act()
