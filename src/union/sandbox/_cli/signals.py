"""Signal handling of ``sbx``: a signal ends the command, the session, and then ``sbx``."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from union.sandbox._session.process import SandboxProcess

__all__ = ["Ending", "run_to_end"]

_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S: Final = 1.0
"""Seconds a command has to end after the first signal; a second signal ends it at once."""


class Ending:
    """Forward the first signal to the command, then cancel the work."""

    def __init__(self) -> None:
        self.caught = 0
        self.process: SandboxProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelled = False
        for number in _ENDING_SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        first = not self.caught
        self.caught = self.caught or number
        if first and self.process is not None:
            self.process.send_signal(number)
            self._loop.call_later(_GRACE_S, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        # Only once, because a second cancellation would interrupt the clean-up.
        if not self._cancelled and self._task is not None:
            self._cancelled = True
            self._task.cancel()


def run_to_end(work: Callable[[Ending], Coroutine[object, object, int]]) -> int:
    """Run ``work`` and return its exit code, or 128+N if signal N ended it."""

    async def main() -> int:
        ending = Ending()
        try:
            code = await work(ending)
        except asyncio.CancelledError:
            if not ending.caught:
                raise
            code = 0
        return 128 + ending.caught if ending.caught else code

    # sbx prints denied connections itself, with the options that allow them.
    logging.getLogger("union.sandbox").addHandler(logging.NullHandler())
    return asyncio.run(main())
