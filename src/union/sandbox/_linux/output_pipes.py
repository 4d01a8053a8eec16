"""The output of one command: read as it comes, paused for a slow reader, drained at the end."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import termios
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.protocol import ExecFlag
from union.sandbox._linux.terminal import read_some

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from union.sandbox._core.events import Event
    from union.sandbox._linux.reader_set import ReaderSet
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._session.transport import Sink

__all__ = ["UNATTACHED", "OutputPipes"]

_CHUNK: Final = 256 * 1024
_FULL: Final = 64 * 1024
"""The default capacity of a pipe."""
_WIDE: Final = 1024 * 1024
_GET_SIZE: Final[int | None] = getattr(fcntl, "F_GETPIPE_SZ", None)
_SET_SIZE: Final[int | None] = getattr(fcntl, "F_SETPIPE_SZ", None)
"""None on macOS, where the capacity of a pipe is not the program's to choose."""
_ROUND: Final = 4
"""Chunks read from one pipe before the other descriptors get their turn."""
_HELD_S: Final = 0.25
"""How long a pipe may stay open after the tree has ended. Its own copies are closed by then, or a
few milliseconds later where the first process was killed."""


class _Unattached:
    """The sink of a run that was not attached to its reader yet: every event is an error."""

    def event(self, event: Event) -> None:
        raise RuntimeError(f"the run is not attached: {event}")

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        raise RuntimeError(f"the run is not attached: {len(data)} bytes of {fd}")

    def end_of_output(self, fd: int) -> None:
        raise RuntimeError(f"the run is not attached: end of {fd}")

    def decision(self, decision: Decision) -> None:
        raise RuntimeError(f"the run is not attached: {decision}")

    def request(self, request: HttpRequest) -> None:
        raise RuntimeError(f"the run is not attached: {request}")


UNATTACHED: Final = _Unattached()


class OutputPipes:
    """Reads the near ends of a command's output, by the number that the command writes to."""

    def __init__(self, readers: ReaderSet, sink: Sink) -> None:
        self._readers = readers
        self.sink = sink
        self._near: dict[int, int] = {}
        self._at_end: list[int] = []
        """Pipes that are at their end, to be closed off the critical path."""
        self._paused: set[int] = set()
        self._widened: set[int] = set()
        self._left: dict[int, int] = {}
        """Bytes that are still read from pipes that a process of another tree holds open."""
        self._grace: asyncio.TimerHandle | None = None
        self._is_held = False
        self._is_requested = False
        self._keep: Callable[[int], None] | None = None

    @property
    def near_ends(self) -> Mapping[int, int]:
        return self._near

    def add(self, fd: int, near: int) -> None:
        """Take over the near end of output ``fd``; `listen` begins to read it."""
        self._near[fd] = near

    def open(
        self,
        make: Callable[[], tuple[int, int]],
        given: dict[int, int],
        *,
        pipes: tuple[bool, bool],
        merge: bool,
    ) -> None:
        """Open the pipes that are read; add their far ends to ``given``, by their `ExecFlag`."""
        for fd, wanted in enumerate(pipes, start=1):
            if wanted:
                self._near[fd], given[1 << fd] = make()
        if merge:
            given[ExecFlag.STDERR] = os.dup(given[ExecFlag.STDOUT])

    def hold(self) -> None:
        """Read nothing before `begin`, because the command may not start."""
        self._is_held = True

    def begin(self) -> None:
        """The command has started: read as requested."""
        self._is_held = False
        if self._is_requested:
            self.listen()

    def add_line(self, line: str, end: str) -> None:
        """Deliver a line on stderr, or on stdout if that is the only stream."""
        fd = 2 if 2 in self._near else 1
        if fd in self._near:
            self.sink.output(fd, (line + end).encode("utf-8", "surrogateescape"))

    def listen(self) -> None:
        """Read output as it comes. Output of a command that has already ended was read then.

        The end of a short command wakes the event loop once, when all of it is there; the end of
        each stream would wake it before, in the middle of the command's own end and in its way.
        """
        self._is_requested = True
        if self._is_held:
            return
        for fd in self._near:
            if fd not in self._paused:
                self.listen_to(fd)

    def listen_to(self, fd: int) -> None:
        self._readers.add(self._near[fd], functools.partial(self._on_output, fd))

    def _on_output(self, fd: int) -> None:
        if self._left:
            self._read_held(fd)
            return
        near = self._near[fd]
        for _ in range(_ROUND):
            try:
                data = read_some(near, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._close(fd)
                return
            if not self.sink.output(fd, data):
                self._paused.add(fd)
                self._readers.remove(near)
                return
            if len(data) < _FULL:
                return
            if fd not in self._widened:
                self._widened.add(fd)
                _widen(near)

    def pending(self) -> dict[int, int]:
        """Return how many bytes each pipe holds at this moment."""
        return {fd: _unread(near) for fd, near in self._near.items()}

    def read_now(self) -> None:
        """Read what is there without waiting for the event loop."""
        for fd in tuple(self._near):
            if fd in self._near and fd not in self._paused:
                self._on_output(fd)

    def drain(self) -> None:
        """Read what the pipes still hold: the tree has ended, so no more will come."""
        for fd in tuple(self._near):
            while fd in self._near and fd not in self._paused:
                near = self._near[fd]
                try:
                    data = read_some(near, _CHUNK)
                except BlockingIOError:
                    # It is still dying, or a process of another tree holds the far end.
                    self.listen_to(fd)
                    break
                if not data:
                    self._at_end.append(self._take(fd))
                    self.sink.end_of_output(fd)
                elif not self.sink.output(fd, data):
                    self._paused.add(fd)
                    self._readers.remove(near)
        if self._near and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(_HELD_S, self._end_held)

    def _end_held(self) -> None:
        """End the output although another process holds the far end, and could write for ever.

        All that the tree has written is in the pipe, which holds a bounded number of bytes. As many
        are read, as the reader takes them; then, or when the pipe is empty, the output is over.
        """
        self._grace = None
        self._left = {fd: _capacity(near) for fd, near in self._near.items()}
        for fd in tuple(self._near):
            self._read_held(fd)

    def _read_held(self, fd: int) -> None:
        while fd in self._near and fd not in self._paused:
            near, left = self._near[fd], self._left[fd]
            try:
                data = read_some(near, min(left, _CHUNK))
            except BlockingIOError:
                data = b""
            if not data:  # it is empty, at its end, or has given all that the tree wrote
                self._close(fd)
                return
            self._left[fd] = left - len(data)
            if not self.sink.output(fd, data):
                self._paused.add(fd)
                self._readers.remove(near)

    def leave(self, keep: Callable[[int], None]) -> None:
        """End the output of a command whose processes may go on.

        The pipes hold all that the command has written itself; as many bytes are read, as the
        reader takes them. ``keep`` then takes over each pipe that another process still holds.
        """
        self._keep = keep
        for fd in tuple(self._near):
            self._left[fd] = _WIDE
            self._read_held(fd)

    def resume(self, fd: int) -> None:
        """Read a paused stream again."""
        if fd not in self._paused:
            return
        self._paused.discard(fd)
        if fd in self._left:
            asyncio.get_running_loop().call_soon(self._read_held, fd)
        else:
            self.listen_to(fd)

    def _close(self, fd: int) -> None:
        (self._keep or os.close)(self._take(fd))
        self.sink.end_of_output(fd)

    def _take(self, fd: int) -> int:
        near = self._near.pop(fd)
        self._left.pop(fd, None)
        self._readers.remove(near)
        if self._grace is not None and not self._near:
            self._stop_waiting()
        return near

    def _stop_waiting(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def release(self) -> None:
        """Close the near ends without an end of output: the sink learns of the failure itself."""
        for near in self._near.values():
            self._readers.remove(near)
            os.close(near)
        self._near.clear()
        self._paused.clear()
        self._stop_waiting()

    def abandon(self) -> None:
        """Close the near ends of a session that closes: no reader will come."""
        for fd in tuple(self._near):
            self._paused.discard(fd)
            self._close(fd)

    def discard(self) -> None:
        """Close the near ends of a command that was never listened to; any thread may do it."""
        while self._near:
            os.close(self._near.popitem()[1])

    def close_ended(self) -> None:
        """Close the pipes that reached their end."""
        close_all(self._at_end)
        self._at_end.clear()


def _capacity(pipe: int) -> int:
    """Return how many bytes a pipe, or a terminal, can hold at most."""
    if _GET_SIZE is None:
        return _WIDE
    try:
        return max(fcntl.fcntl(pipe, _GET_SIZE), _WIDE)
    except OSError as exc:
        if exc.errno != errno.EBADF:  # the kernel's answer for what is not a pipe
            raise
        return _WIDE


def _unread(pipe: int) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


def _widen(pipe: int) -> None:
    """Raise the capacity of a pipe, so that a command that writes much wakes the loop less."""
    if _SET_SIZE is not None:
        with contextlib.suppress(PermissionError):  # the user's limit on pipe pages is reached
            fcntl.fcntl(pipe, _SET_SIZE, _WIDE)
