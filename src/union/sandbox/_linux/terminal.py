"""The host's end of a command's terminal: its output is read, its input is written."""

from __future__ import annotations

import errno
import os
import termios
from typing import Final

from union.sandbox._linux.stdin import StdinPipe

__all__ = ["Terminal", "TerminalInput", "read_some"]

_END_OF_FILE: Final = b"\x04"
"""Ctrl-D. At the start of a line it ends the input; elsewhere the first one only sends the line."""


def read_some(fd: int, max_bytes: int) -> bytes:
    """Return bytes from a pipe or a terminal; empty at end of file."""
    try:
        return os.read(fd, max_bytes)
    except OSError as exc:
        if exc.errno == errno.EIO:  # no process has the terminal open any more
            return b""
        raise


class TerminalInput(StdinPipe):
    """The input of a terminal. Its end is a character: a terminal has no half-close."""

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
    """One command's terminal: its initial window size, its input and its device.

    The device is only held open, so that a command that closes its terminal can open it again; it
    is closed when the command has ended.
    """

    def __init__(self, window: tuple[int, int], stdin: bytes | str | None) -> None:
        self.window = window
        self._stdin = stdin
        self._device: int | None = None

    def take(self, fd: int, device: int) -> TerminalInput:
        """Take over both descriptors; return the input, already complete unless stdin is a pipe."""
        self._device = device
        typed = TerminalInput(os.dup(fd))
        if not isinstance(self._stdin, str):
            typed.feed(self._stdin or b"")
            typed.close()
        return typed

    def resize(self, fd: int, rows: int, cols: int) -> None:
        """Set the window size; the kernel sends SIGWINCH to the foreground process group."""
        termios.tcsetwinsize(fd, (rows, cols))

    def release(self) -> None:
        """Close the device."""
        if self._device is not None:
            os.close(self._device)
            self._device = None
