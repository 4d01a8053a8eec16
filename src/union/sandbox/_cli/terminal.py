"""The caller's terminal while a command has a terminal in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import tty
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._session.process import SandboxProcess

__all__ = ["follow_window", "raw", "window"]


def window() -> tuple[int, int] | None:
    """Return rows and columns of the caller's terminal; None without one."""
    for fd in (0, 1, 2):
        try:
            rows, cols = termios.tcgetwinsize(fd)
        except (OSError, termios.error):
            continue
        if rows and cols:
            return rows, cols
    return None


@contextlib.contextmanager
def raw(fd: int) -> Iterator[None]:
    """Put the terminal into raw mode, so that every key goes to the command; restore it."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()
    # A shell that stopped and continued this process has restored its own modes.
    loop.add_signal_handler(signal.SIGCONT, tty.setraw, fd, termios.TCSADRAIN)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        # Unread input is dropped: a terminal's late reply to a query of the command would appear
        # as typed text at the caller's prompt.
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def follow_window(process: SandboxProcess) -> Iterator[None]:
    """Keep the window size inside equal to the caller's window size."""

    def resize() -> None:
        if (size := window()) is not None:
            process.resize(*size)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, resize)
    try:
        resize()  # it may have changed while the command was being started
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
