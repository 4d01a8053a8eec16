"""A machine: the namespaces that all commands of a session share, and their first process.

The first process of the pid namespace signals the processes of one command on request. They are
found by the command's user namespace, which no process can leave; its inode number is the label.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._linux.descriptors import close_all
from union.sandbox._linux.left_output import LeftOutput
from union.sandbox._linux.protocol import SIMPLE, Message

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from union.sandbox._linux.reader_set import ReaderSet

__all__ = ["Machine"]

_MAX_NUMBER: Final = 2**31 - 1
_RETRY_S: Final = 0.05
_LOOK_S: Final = 1.0
"""How often the processes of a network that outlives its command are counted."""


class Machine:
    """The machine of one session, from its start until its last user closes it."""

    DESCRIPTORS: ClassVar[int] = 7
    """Six namespaces and /proc, as its first process sends them."""

    def __init__(
        self,
        sock: socket.socket,
        fds: tuple[int, ...],
        readers: ReaderSet,
        *,
        locate: Callable[[], Coroutine[None, None, int]],
    ) -> None:
        """Take over the socket of its first process and the descriptors that it has sent.

        Args:
            sock: the socket.
            fds: the descriptors.
            readers: the descriptors that the session's event loop reads.
            locate: returns the pid of its first process on this host; 0 if it has ended.

        """
        self.locate = locate
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._readers = readers
        self.namespaces = fds[:-1]
        self.proc = fds[-1]
        """The directory /proc of its pid namespace."""
        self._requests: dict[int, asyncio.Future[int]] = {}
        self._number = 0
        self.is_lost = False
        """Whether its first process has ended, and everything inside with it."""
        self.left_output = LeftOutput(readers)
        self._networks: set[asyncio.Task[None]] = set()
        """Each closes the network that outlives a command, also if it is cancelled."""
        readers.add(sock.fileno(), self._on_readable)

    def check_alive(self) -> None:
        """Raise if the machine has ended: its files and processes are gone."""
        if self.is_lost:
            raise OSError(
                errno.EOWNERDEAD,
                "the machine of the session has ended, with its processes and scratch files; "
                "open a new session",
            )

    def signal(self, label: int, signum: int) -> asyncio.Future[int]:
        """Signal every process of a command. The result is the number of those that are left.

        After SIGKILL it is 0, unless a process cannot be killed. With signal 0 the processes are
        only counted. A machine that has ended has none.
        """
        done: asyncio.Future[int] = self._loop.create_future()
        if self.is_lost:
            done.set_result(0)
            return done
        self._number = self._number % _MAX_NUMBER + 1
        self._requests[self._number] = done
        self._send(SIMPLE.pack(Message.TREE, label, signum, self._number))
        return done

    def _send(self, message: bytes) -> None:
        if self.is_lost:
            return
        try:
            self._sock.send(message)
        except BlockingIOError:  # it is busy with earlier requests
            self._loop.call_later(_RETRY_S, self._send, message)
        except OSError:
            self._on_lost()

    def _on_readable(self) -> None:
        while not self.is_lost:
            try:
                data = self._sock.recv(SIMPLE.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if len(data) != SIMPLE.size:
                self._on_lost()
                return
            kind, _, left, number = SIMPLE.unpack(data)
            done = self._requests.pop(number, None) if kind == Message.TREE_DONE else None
            if done is not None and not done.done():
                done.set_result(left)

    def _on_lost(self) -> None:
        self.is_lost = True
        self._readers.remove(self._sock.fileno())
        self._sock.close()
        for done in self._requests.values():
            if not done.done():
                done.set_result(0)
        self._requests.clear()

    def keep_network(self, label: int, close: Callable[[], Coroutine[None, None, None]]) -> None:
        """Close the network of a command that has ended when its last process has."""
        watch = self._loop.create_task(self._watch_network(label, close))
        self._networks.add(watch)
        watch.add_done_callback(self._networks.discard)

    async def _watch_network(
        self, label: int, close: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        try:
            while await self.signal(label, 0):  # noqa: ASYNC110 - the kernel reports no such end
                await asyncio.sleep(_LOOK_S)
        finally:
            await close()

    def close_networks(self) -> tuple[asyncio.Task[None], ...]:
        """Close the networks that outlive their command; return what to wait for."""
        watches = tuple(self._networks)
        for watch in watches:
            watch.cancel()
        return watches

    def end(self) -> None:
        """End everything inside; a command that comes later is refused."""
        if not self.is_lost:
            self._on_lost()

    def close(self) -> None:
        """End the machine and everything inside; its descriptors may be reused."""
        self.end()
        self.left_output.close()
        close_all((*self.namespaces, self.proc))
