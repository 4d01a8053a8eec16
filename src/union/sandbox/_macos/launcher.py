"""The portable launcher, and a session's channel to it (``native/posix``).

Rules of this file:

- The protocol is that of the Linux launcher; only the request for a sandbox differs, because
  nothing is mounted: it names the program that builds the sandbox, if there is one.
- A socket that was sent is held until the launcher confirms it: macOS may end a connection whose
  only descriptor is in flight.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._linux.channel import Channel
from union.sandbox._linux.descriptors import message_pair, send_with_fds
from union.sandbox._linux.launcher import Launcher, Process
from union.sandbox._linux.protocol import BEGIN, Message, PrepareFlag

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from union.sandbox._linux.reader_set import ReaderSet

__all__ = ["BINARY", "PortableChannel", "PortableLauncher"]

BINARY: Path = Path(__file__).parent / "bin" / "sandbox-launcher"
_HELD_S: Final = 5.0
_ATTACHED: Final = 0
"""The number that confirms the channel itself; sandboxes count from 1."""


class PortableLauncher(Launcher):
    """The launcher process of this host process, on a system that is not Linux."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, socket.socket] = {}
        """Far ends of new channels, by the descriptor of the near end."""

    @classmethod
    def binary(cls) -> Path:
        """Return the path of the launcher's program."""
        return BINARY

    def _start(self, control: socket.socket) -> Process:
        # It watches its parent process itself, and a host that ends also closes the control socket.
        return self._spawn(control, stdout=subprocess.DEVNULL)

    def _reset_inherited(self, pid: int) -> None:
        """Leave the limits as they are: commands run with the caller's id and priorities."""

    def _sent(self, ours: socket.socket, theirs: socket.socket) -> None:
        if ours.fileno() < 0:
            theirs.close()
        else:
            self.held[ours.fileno()] = theirs


class PortableChannel(Channel):
    """One session's channel to the portable launcher."""

    launcher: ClassVar[type[Launcher]] = PortableLauncher

    def __init__(self, readers: ReaderSet) -> None:
        self._held: dict[int, socket.socket] = {}
        super().__init__(readers)
        if isinstance(self._launcher, PortableLauncher):
            self._hold(_ATTACHED, self._launcher.held.pop(self._sock.fileno()))

    def begin(
        self,
        *,
        label: str,
        wrapper: Sequence[str] = (),
        memory_bytes: int | None = None,
        processes: int = 0,
        on_gone: Callable[[], None] | None = None,
    ) -> tuple[int, socket.socket]:
        """Begin a sandbox. Return its number and the socket to its first process.

        Args:
            label: distinguishes its processes from all others, where the system supports that.
            wrapper: the program that builds the sandbox, with its arguments; empty: none.
            memory_bytes: limit on the memory of all its processes; None: no limit.
            processes: limit on the number of its processes; 0: no limit.
            on_gone: called when every process of the sandbox has ended.

        """
        if self.lost:
            raise self.end_reason()
        ours, theirs = message_pair()
        self._ids += 1
        number = self._ids
        flags = PrepareFlag.NOTIFY if on_gone is not None else 0
        head = BEGIN.pack(
            Message.BEGIN, number, flags, len(wrapper), processes, 0, memory_bytes or 0
        )
        body = "\0".join((label, *wrapper, "")).encode("utf-8", "surrogateescape")
        try:
            send_with_fds(self._sock, head + body, [theirs.fileno()])
        except BaseException as exc:
            ours.close()
            theirs.close()
            if isinstance(exc, BrokenPipeError | ConnectionResetError):
                self._drain_and_lose()
                raise self.end_reason() from exc
            raise
        self._hold(number, theirs)
        if on_gone is not None:
            self._gone[number] = on_gone
        ours.setblocking(False)
        return number, ours

    def _hold(self, number: int, sock: socket.socket) -> None:
        self._held[number] = sock
        # The end of a launcher that dies before it confirms must still be noticed.
        self._loop.call_later(_HELD_S, self._close_held, number)

    def _close_held(self, number: int) -> None:
        if (sock := self._held.pop(number, None)) is not None:
            sock.close()

    def _dispatch(self, kind: int, number: int, value: int) -> None:
        if kind == Message.BEGUN:
            self._close_held(number)
        else:
            super()._dispatch(kind, number, value)

    def _end_all(self) -> None:
        for number in tuple(self._held):
            self._close_held(number)
        super()._end_all()
