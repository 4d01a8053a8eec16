"""When the next spare is prepared: early enough for the next command, without slowing this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from union.sandbox._linux.run import LocalRun

__all__ = ["FollowUps"]

_LISTEN_S: Final = {"python": 0.006, "shell": 0.002, "argv": 0.002}
"""Delay before output is read. A short command has ended by then; its end reads the output, and
doing this work earlier would slow it down."""
_LONG_S: Final = 0.006
"""Delay before the next spare is prepared while a command runs on."""
_IN_A_ROW_S: Final = 0.001
"""The same between scripts without a pause, if the next Python is a fork: other processes prepare
it while the script runs. After a pause that would only slow the script down."""
_PAUSE_S: Final = 0.002
"""The time between two commands that is a pause."""
_AFTER_END_S: Final = 0.0005
"""Delay after the end of a command, in which its caller receives the answer first."""


class FollowUps:
    """Schedule the work that follows the start of each command."""

    def __init__(self) -> None:
        self._last_end = -_PAUSE_S

    def note_end(self, run: LocalRun) -> None:
        """Record that a command has ended."""
        self._last_end = run.finished.get_loop().time()

    def schedule(
        self,
        run: LocalRun,
        kind: str,
        follow_up: Callable[[], object],
        *,
        forks: bool,
        others: int,
    ) -> None:
        """Call ``follow_up`` once.

        Args:
            run: the command that has just started.
            kind: the kind of the command.
            follow_up: reads the output, and prepares the next spare.
            forks: whether the next spare is a Python that a template forks.
            others: the number of other commands that run.

        """
        loop = run.finished.get_loop()  # Python 3.11 makes a system call for the running loop
        now = loop.time()
        if others > 0 or now - self._last_end < _PAUSE_S:
            loop.call_later(_IN_A_ROW_S if forks else _LISTEN_S[kind], follow_up)
            return
        listen_s = _LISTEN_S[kind]
        due = now + _LONG_S
        timer: asyncio.TimerHandle

        def listen() -> None:
            nonlocal timer
            run.listen()
            timer = loop.call_at(due, follow_up)

        timer = loop.call_later(listen_s, follow_up if listen_s >= _LONG_S else listen)

        def advance(_: asyncio.Future[None]) -> None:
            if loop.time() + _AFTER_END_S < due:
                timer.cancel()
                loop.call_later(_AFTER_END_S, follow_up)

        run.finished.add_done_callback(advance)
