"""The output of one command: read as it comes, paused for a slow reader, drained at the end."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.prepared import close_all
from union.sandbox._linux.terminal import read_some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._core.decision import Decision
    from union.sandbox._core.events import Event
    from union.sandbox._linux.ears import Ears
    from union.sandbox._session.transport import Sink

__all__ = ["UNATTACHED", "OutputPipes"]

_CHUNK: Final = 256 * 1024
_FULL: Final = 64 * 1024
"""The default capacity of a pipe."""
_WIDE: Final = 1024 * 1024
_ROUND: Final = 4
"""Chunks read from one pipe before the other descriptors get their turn."""


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


UNATTACHED: Final = _Unattached()


class OutputPipes:
    """Reads the near ends of a command's output, by the number that the command writes to."""

    def __init__(self, ears: Ears, sink: Sink) -> None:
        self._ears = ears
        self.sink = sink
        self._near: dict[int, int] = {}
        self._at_end: list[int] = []
        """Pipes that are at their end, to be closed off the critical path."""
        self._paused: set[int] = set()
        self._widened: set[int] = set()

    @property
    def near_ends(self) -> Mapping[int, int]:
        return self._near

    def add(self, fd: int, near: int) -> None:
        """Take over the near end of output ``fd``; `listen` begins to read it."""
        self._near[fd] = near

    def listen(self) -> None:
        """Read output as it comes. Output of a command that has already ended was read then.

        The end of a short command wakes the event loop once, when all of it is there; the end of
        each stream would wake it before, in the middle of the command's own end and in its way.
        """
        for fd in self._near:
            if fd not in self._paused:
                self.listen_to(fd)

    def listen_to(self, fd: int) -> None:
        self._ears.add(self._near[fd], functools.partial(self._on_output, fd))

    def _on_output(self, fd: int) -> None:
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
                self._ears.remove(near)
                return
            if len(data) < _FULL:
                return
            if fd not in self._widened:
                self._widened.add(fd)
                _widen(near)

    def drain(self) -> None:
        """Read what the pipes still hold: the tree has ended, so no more will come."""
        for fd in tuple(self._near):
            while fd in self._near and fd not in self._paused:
                near = self._near[fd]
                try:
                    data = read_some(near, _CHUNK)
                except BlockingIOError:
                    # It is still dying, or a copy of the far end is open elsewhere.
                    self.listen_to(fd)
                    break
                if not data:
                    self._at_end.append(self._take(fd))
                    self.sink.end_of_output(fd)
                elif not self.sink.output(fd, data):
                    self._paused.add(fd)
                    self._ears.remove(near)

    def resume(self, fd: int) -> None:
        """Read a paused stream again."""
        if fd in self._paused:
            self._paused.discard(fd)
            self.listen_to(fd)

    def _close(self, fd: int) -> None:
        os.close(self._take(fd))
        self.sink.end_of_output(fd)

    def _take(self, fd: int) -> int:
        near = self._near.pop(fd)
        self._ears.remove(near)
        return near

    def release(self) -> None:
        """Close the near ends without an end of output: the sink learns of the failure itself."""
        for near in self._near.values():
            self._ears.remove(near)
            os.close(near)
        self._near.clear()
        self._paused.clear()

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


def _widen(pipe: int) -> None:
    """Raise the capacity of a pipe, so that a command that writes much wakes the loop less."""
    with contextlib.suppress(PermissionError):  # the user's limit on pipe pages is reached
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _WIDE)
