"""What a signal to ``sbx`` does: it ends the command, the session, and then ``sbx``."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from union.sandbox._session.process import SandboxProcess

__all__ = ["Ending", "run_to_end"]

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S: Final = 1.0
"""How long a command may take to end by itself after a signal; a second signal does not wait."""


class Ending:
    """Passes the first signal on to the command; then everything is ended."""

    def __init__(self) -> None:
        self.caught = 0
        self.process: SandboxProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelled = False
        for number in _ENDING:
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
        # Once: what follows is the clean-up, and that is not to be interrupted.
        if not self._cancelled and self._task is not None:
            self._cancelled = True
            self._task.cancel()


def run_to_end(work: Callable[[Ending], Coroutine[object, object, int]]) -> int:
    """Runs ``work``; its exit code, or 128+N when signal N ended it."""

    async def main() -> int:
        ending = Ending()
        try:
            code = await work(ending)
        except asyncio.CancelledError:
            if not ending.caught:
                raise
            code = 0
        return 128 + ending.caught if ending.caught else code

    # What the library would log, sbx says at the end, in the words of its own options.
    logging.getLogger("union.sandbox").addHandler(logging.NullHandler())
    return asyncio.run(main())
