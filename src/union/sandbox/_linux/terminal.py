"""Our end of a command's terminal: what it shows is read, what is typed is written."""

from __future__ import annotations

import errno
import os
import termios
from typing import Final

from union.sandbox._linux.stdin import StdinPipe

__all__ = ["Terminal", "TerminalInput", "read_some"]

_END_OF_FILE: Final = b"\x04"
"""Ctrl-D. At the start of a line it ends the input; elsewhere the first one only sends the line."""


def read_some(fd: int, most: int) -> bytes:
    """What a pipe or a terminal holds; empty at its end."""
    try:
        return os.read(fd, most)
    except OSError as exc:
        if exc.errno == errno.EIO:  # how a terminal says that nobody has it open any more
            return b""
        raise


class TerminalInput(StdinPipe):
    """What is typed. Its end is a character: a terminal cannot be closed in one direction."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._at_line_start = True

    def feed(self, data: bytes) -> None:
        if data:
            self._at_line_start = data.endswith((b"\n", b"\r"))
        super().feed(data)

    def close(self) -> None:
        if not self._closing:
            super().feed(_END_OF_FILE if self._at_line_start else _END_OF_FILE * 2)
        super().close()


class Terminal:
    """One command's terminal: the window it starts with, what is typed, and its device.

    The device is only held, so that a command that closes its terminal for a while can open it
    again; it is let go when the command has ended.
    """

    def __init__(self, window: tuple[int, int], stdin: bytes | str | None) -> None:
        self.window = window
        self._stdin = stdin
        self._device: int | None = None

    def take(self, fd: int, device: int) -> TerminalInput:
        """Types what was given, and then the end of file; with ``pipe`` both come later."""
        self._device = device
        typed = TerminalInput(os.dup(fd))
        if not isinstance(self._stdin, str):
            typed.feed(self._stdin or b"")
            typed.close()
        return typed

    def resize(self, fd: int, rows: int, cols: int) -> None:
        """The command's foreground group is told by SIGWINCH."""
        termios.tcsetwinsize(fd, (rows, cols))

    def release(self) -> None:
        if self._device is not None:
            os.close(self._device)
            self._device = None
