"""The caller's own terminal, while a command has one inside."""

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
    """Rows and columns of the terminal we are at; None without one."""
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
    """Every key goes to the command, Ctrl-C too; as it was before on any way out."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()
    # A shell that stopped and continues us has put its own modes back.
    loop.add_signal_handler(signal.SIGCONT, tty.setraw, fd, termios.TCSADRAIN)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        # What was not read goes: a terminal's late answer to a question that the command asked
        # would be typed at the caller's prompt.
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def follow_window(process: SandboxProcess) -> Iterator[None]:
    """The window inside is the window outside, also when that changes."""

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
