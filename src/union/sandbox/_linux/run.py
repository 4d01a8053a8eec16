"""One command in one sandbox: from a prepared sandbox to its end.

Everything here happens in callbacks of the event loop: no thread, no task, no polling. Each
descriptor has one owner at a time: pipes' far ends are closed as soon as they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._linux.command import RLIMIT_BYTES
from union.sandbox._linux.failures import explain
from union.sandbox._linux.launcher import receive, sealed_memfd, send_with_fds
from union.sandbox._linux.stdin import StdinPipe
from union.sandbox._linux.terminal import Terminal, read_some
from union.sandbox.constants import KILL_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from union.sandbox._core.decision import Decision
    from union.sandbox._core.events import Event
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.launcher import Channel
    from union.sandbox._session.transport import Sink

__all__ = ["FAILED", "READY", "LocalRun", "NotBuiltError", "Sandbox"]

_EXEC, _SIGNAL = 30, 31
READY, _STARTED, _EXITED, FAILED, _TERMINAL = 40, 41, 42, 43, 45
_HAS_STDIN, _HAS_SCRIPT, _HAS_PAYLOAD, _HAS_WAIT, _TTY, _TELL = 1, 8, 16, 32, 64, 128
_SIMPLE = struct.Struct("=IIii")
_EXIT = struct.Struct("=IiQQQ")
_EXEC_MSG = struct.Struct("=10I")
_MESSAGE: Final = 512
_INLINE: Final = 60 * 1024
_CHUNK: Final = 256 * 1024
_FULL: Final = 64 * 1024
"""What a pipe holds unless told otherwise."""
_WIDE: Final = 1024 * 1024
_ROUND: Final = 4
"""Chunks taken from one pipe before the other descriptors get their turn."""
_MOST_DOORS: Final = 8
_AGAIN_S: Final = 0.1
_OUR_KILL_DELAY_S: Final = 2.0
"""How long the sandbox's first process may take to obey before it is killed from outside."""


class Sandbox:
    """A prepared sandbox: its socket, and what must happen when it has ended."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        *,
        line: Channel,
        owner: int | None,
        first_pid: asyncio.Future[int] | None = None,
    ) -> None:
        self.first_pid = first_pid
        """The number of its first process on the host, where that was asked for."""
        self.number = number
        self.sock = sock
        self.line = line
        self.owner = owner
        """The id that must own what the command may reopen, such as its pipes."""
        self.was_out_of_memory: Callable[[], bool] = lambda: False
        self.peak_memory: Callable[[], int | None] = lambda: None
        self._pipes: list[tuple[int, int]] = []
        """For the output of a command to come: (near end, far end)."""

    def kill(self) -> None:
        if not self.line.kill(self.number) and self.sock.fileno() >= 0:
            # The launcher has died, and nearly everything with it. One that was being made just
            # then lives on; it ends when it hears nothing from us any more.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def lay_pipes(self) -> None:
        """Ahead of a command, for both its streams."""
        for _ in (1, 2):
            self._pipes.append(self._new_pipe())

    def pipe(self) -> tuple[int, int]:
        """A pipe that is there already, or a new one; it is the caller's."""
        return self._pipes.pop() if self._pipes else self._new_pipe()

    def _new_pipe(self) -> tuple[int, int]:
        near, far = os.pipe2(os.O_CLOEXEC)
        try:
            fcntl.fcntl(near, fcntl.F_SETFL, os.O_NONBLOCK)
            if self.owner is not None:
                # So that the command can open /dev/stdout: it checks the owner of the pipe.
                os.fchown(far, self.owner, self.owner)
        except OSError:
            _close_all((near, far))
            raise
        return near, far

    def drop_pipes(self) -> None:
        """Closes those that nobody has asked for."""
        while self._pipes:
            _close_all(self._pipes.pop())

    def last_words(self) -> tuple[int, int, bytes] | None:
        """Of one that has ended: the step that failed, its errno, and what bwrap said."""
        with contextlib.suppress(OSError):
            while data := self.sock.recv(_MESSAGE):
                if int.from_bytes(data[:4], sys.byteorder) == FAILED and len(data) >= _SIMPLE.size:
                    _, where, error, _ = _SIMPLE.unpack_from(data)
                    return where, error, data[_SIMPLE.size :]
        return None

    def let_go(self) -> None:
        """Lets an unused sandbox go: its processes see that, and end."""
        self.sock.close()
        self.drop_pipes()


class _GarbledError(Exception):
    """The sandbox's first process said what it never says: it is not to be believed any more."""


class NotBuiltError(BrokenPipeError):
    """A command could not be handed over because its sandbox could not be built."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(errno.EPIPE, failed.reason)
        self.failed = failed


class _Nobody:
    """Listens to a run that has not been handed to anybody yet."""

    def event(self, event: Event) -> None:
        raise RuntimeError(f"nobody listens: {event}")

    def output(self, fd: int, data: bytes | memoryview) -> bool:
        raise RuntimeError(f"nobody listens: {len(data)} bytes of {fd}")

    def end_of_output(self, fd: int) -> None:
        raise RuntimeError(f"nobody listens: end of {fd}")

    def decision(self, decision: Decision) -> None:
        raise RuntimeError(f"nobody listens: {decision}")


_NOBODY: Final = _Nobody()


class LocalRun:
    """A command in flight (the Run protocol), feeding a Sink."""

    def __init__(self, sandbox: Sandbox, *, isolation: Isolation) -> None:
        self._loop = asyncio.get_running_loop()
        self.isolation = isolation
        self.sandbox = sandbox
        self._ears = sandbox.line.ears
        self._sink: Sink = _NOBODY
        self._pipes: dict[int, int] = {}
        self._read_out: list[int] = []
        """Pipes that are at their end, to be closed when nobody waits for that."""
        self._paused: set[int] = set()
        self._widened: set[int] = set()
        self._stdin: StdinPipe | None = None
        self._terminal: Terminal | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._cause = ""
        self._program = ""
        self._ended = False
        self.started: asyncio.Future[None] | None = None
        """Done when the command is known to have started or failed, where that was asked for."""
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self.failure: tuple[int, int] | None = None
        self.on_doors: Callable[[list[int]], None] = _close_all
        self.close_doors: Callable[[], Coroutine[None, None, None]] | None = None
        self._closing_doors: asyncio.Task[None] | None = None

    def send(
        self,
        command: Command,
        *,
        pipes: tuple[bool, bool],
        stdin: bytes | str | None = None,
        wait: int | None = None,
        pty: tuple[int, int] | None = None,
        tell: bool = False,
    ) -> None:
        """Hands the command over.

        ``pipes`` says which output is wanted, ``wait`` is a descriptor that the program will wait
        on. With ``tell``, ``started`` will say when it runs; a terminal, asked for by ``pty``, has
        come then too. After an OSError nothing was started, and everything the run held has been
        let go.
        """
        if pty is not None:
            self._terminal = Terminal(pty, stdin)
            pipes, stdin = (False, False), None
        if tell:
            self.started = self._loop.create_future()
        try:
            self._send(command, pipes, stdin=stdin, wait=wait)
        except (BrokenPipeError, ConnectionResetError) as exc:
            words = self.sandbox.last_words()
            self.discard()
            if words is None:
                raise
            raise NotBuiltError(explain(*words[:2], self._program, words[2])) from exc
        except BaseException:
            self.discard()
            raise

    def _send(
        self,
        command: Command,
        pipes: tuple[bool, bool],
        *,
        stdin: bytes | str | None,
        wait: int | None,
    ) -> None:
        self._program = command.argv[0]
        given: dict[int, int] = {} if wait is None else {_HAS_WAIT: wait}
        """Far ends by what they are for; they are sent in the order of these bits."""
        try:
            if (far := self._make_stdin(stdin)) is not None:
                given[_HAS_STDIN] = far
            for fd, wanted in enumerate(pipes, start=1):
                if wanted:
                    self._pipes[fd], given[1 << fd] = self.sandbox.pipe()
            if command.script is not None:
                given[_HAS_SCRIPT] = sealed_memfd("script", command.script)
            body = command.body()
            size = len(body)
            if size > _INLINE:
                given[_HAS_PAYLOAD] = sealed_memfd("request", body)
                body = b""
            flags = sum(given) | (0 if self.started is None else _TELL)
            window = (0, 0)
            if self._terminal is not None:
                flags, window = flags | _TTY, self._terminal.window
            counts = (len(command.rlimits) // RLIMIT_BYTES, len(command.programs))
            head = _EXEC_MSG.pack(
                _EXEC,
                flags,
                command.slot,
                *counts,
                len(command.argv),
                len(command.env),
                size,
                *window,
            )
            far_ends = [given[bit] for bit in sorted(given)]
            send_with_fds(self.sandbox.sock, head + body, far_ends)
        finally:
            _close_all(given.values())
            self.sandbox.drop_pipes()

    def attach(self, sink: Sink, *, timeout_s: float | None) -> None:
        """Begins to listen: to what is said of the command, not yet to the command itself."""
        self._sink = sink
        self._ears.add(self.sandbox.sock.fileno(), self._on_message)
        if timeout_s is not None:
            self._timers.append(self._loop.call_later(timeout_s, self.end, "timeout"))

    def discard(self) -> None:
        """Lets an unused sandbox and its pipes go; nobody listens to it."""
        self.sandbox.let_go()
        if self._stdin is not None:
            self._stdin.drop()
        while self._pipes:
            os.close(self._pipes.popitem()[1])

    def _make_stdin(self, stdin: bytes | str | None) -> int | None:
        owner = self.sandbox.owner
        if isinstance(stdin, bytes):
            return _read_only(sealed_memfd("stdin", stdin, owner=owner))
        if stdin is None:
            return None
        far, near = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(near, False)
        self._stdin = StdinPipe(near)
        if owner is not None:
            os.fchown(far, owner, owner)
        return far

    # Messages of the sandbox's first process.

    def _on_message(self) -> None:
        try:
            self._take_messages()
        except _GarbledError:
            self._fail(Failed("stream", "what the sandbox said makes no sense"))
        except OSError as exc:  # no descriptor for what came, or for what must be made of it
            self._fail(_no_room(exc))
        except Exception:
            # A fault of ours must end this run, not be repeated for as long as it has something
            # to say.
            self._fail(Failed("stream", "what the sandbox said could not be dealt with"))
            raise

    def _take_messages(self) -> None:
        while not self._ended:
            try:
                data, fds = receive(self.sandbox.sock, _MESSAGE, _MOST_DOORS)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with a message of ours unread. Said once; its last words still come.
                continue
            if not data:
                self._on_lost()
                return
            kind = int.from_bytes(data[:4], sys.byteorder)
            if kind == READY:
                self.on_doors(fds)
            elif kind == _TERMINAL and self._terminal is not None and len(fds) == 2:
                self._take_terminal(self._terminal, *fds)
            else:
                _close_all(fds)  # none comes with anything else
                self._take_word(kind, data)

    def _take_word(self, kind: int, data: bytes) -> None:
        try:
            if kind == _STARTED:
                pid = _SIMPLE.unpack(data)[2]
                self._sink.event(Started(pid))
                _settle(self.started)
            elif kind == _EXITED:
                self._on_exit(*_EXIT.unpack(data)[1:])
            elif kind == FAILED:
                _, where, error, _ = _SIMPLE.unpack_from(data)
                self.failure = (where, error)
                self._fail(explain(where, error, self._program, data[_SIMPLE.size :]))
            else:
                raise _GarbledError
        except struct.error as exc:
            raise _GarbledError from exc

    def _on_exit(self, status: int, user_us: int, system_us: int, maxrss_kib: int) -> None:
        if not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            raise _GarbledError
        self._drain_pipes()
        code = os.waitstatus_to_exitcode(status)
        usage = Usage(
            cpu_user_s=user_us / 1e6,
            cpu_system_s=system_us / 1e6,
            max_rss_bytes=maxrss_kib * 1024,
            peak_memory_bytes=self.sandbox.peak_memory(),
        )
        reason = self._reason(-code if code < 0 else 0)
        self._finish(Exited(128 - code if code < 0 else code, reason, usage))

    def _reason(self, signum: int) -> str:
        if self._cause:
            return self._cause
        # Also when only a child of the command was killed: nothing else would tell.
        if self.sandbox.was_out_of_memory():
            return "oom"
        if not signum:
            return ""
        return "limit" if signum in {signal.SIGXCPU, signal.SIGXFSZ} else "signal"

    def _on_lost(self) -> None:
        """The first process ended without a word: it, or everything, was killed."""
        out_of_memory = self.sandbox.was_out_of_memory()
        if out_of_memory or self._cause:
            self._drain_pipes()
            usage = Usage(peak_memory_bytes=self.sandbox.peak_memory())
            cause = "oom" if out_of_memory else self._cause
            self._finish(Exited(128 + signal.SIGKILL, cause, usage))
        else:
            self._fail(Failed("stream", "the sandbox ended without reporting how"))

    def _fail(self, failed: Failed) -> None:
        self._release()
        self._finish(failed)

    def _finish(self, end: Exited | Failed) -> None:
        # Streams that wait for their reader stay open; the rest of the run is over.
        self._ended = True
        self._shut_doors()
        if self._closing_doors is None:
            self._report(end)
        else:
            # What was decided for connections that were open is known when they are closed.
            self._closing_doors.add_done_callback(lambda _: self._report(end))

    def _shut_doors(self) -> None:
        if self.close_doors is not None and self._closing_doors is None:
            self._closing_doors = self._loop.create_task(self.close_doors())

    def _report(self, end: Exited | Failed) -> None:
        self._sink.event(end)
        self._loop.call_soon(self._end_all)  # after whoever waited for this end

    def _end_all(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self.sandbox.sock.fileno() >= 0:
            self._ears.remove(self.sandbox.sock.fileno())
            self.sandbox.sock.close()
        _close_all(self._read_out)
        self._read_out.clear()
        if self._stdin is not None:
            self._stdin.drop()
        if self._terminal is not None:
            self._terminal.let_go()
        _settle(self.started)
        _settle(self.finished)

    # Output.

    def listen(self) -> None:
        """To the output as it comes. That of a command that has ended before was taken then.

        So the end of a short command wakes us once, when all of it is there; the end of each stream
        would wake us before, in the middle of the command's own end and in its way.
        """
        for fd in self._pipes:
            if fd not in self._paused:
                self._listen(fd)

    def _listen(self, fd: int) -> None:
        self._ears.add(self._pipes[fd], functools.partial(self._on_output, fd))

    def _on_output(self, fd: int) -> None:
        pipe = self._pipes[fd]
        for _ in range(_ROUND):
            try:
                data = read_some(pipe, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe(fd)
                return
            if not self._sink.output(fd, data):
                self._paused.add(fd)
                self._ears.remove(pipe)
                return
            if len(data) < _FULL:
                return
            if fd not in self._widened:
                self._widened.add(fd)
                _widen(pipe)

    def _drain_pipes(self) -> None:
        """The tree is dead: what its pipes still hold is all there will be."""
        if self._terminal is not None:
            self._terminal.let_go()
        for fd in tuple(self._pipes):
            while fd in self._pipes and fd not in self._paused:
                before = self._pipes[fd]
                try:
                    data = read_some(before, _CHUNK)
                except BlockingIOError:
                    # It is still dying, or a copy of the far end is open elsewhere.
                    self._listen(fd)
                    break
                if not data:
                    self._read_out.append(self._take_pipe(fd))
                    self._sink.end_of_output(fd)
                elif not self._sink.output(fd, data):
                    self._paused.add(fd)
                    self._ears.remove(before)

    def resume(self, fd: int) -> None:
        if fd in self._paused:
            self._paused.discard(fd)
            self._listen(fd)

    def _close_pipe(self, fd: int) -> None:
        os.close(self._take_pipe(fd))
        self._sink.end_of_output(fd)

    def _take_pipe(self, fd: int) -> int:
        pipe = self._pipes.pop(fd)
        self._ears.remove(pipe)
        return pipe

    def _release(self) -> None:
        """Closes the near ends without telling the sink, which learns of the failure itself."""
        for pipe in self._pipes.values():
            self._ears.remove(pipe)
            os.close(pipe)
        self._pipes.clear()
        self._paused.clear()

    def abandon(self) -> None:
        """The session closes: no reader will come any more."""
        for fd in tuple(self._pipes):
            self._paused.discard(fd)
            self._close_pipe(fd)

    # Signals and ends.

    def signal(self, signum: int) -> None:
        if self._ended:
            return
        try:
            self.sandbox.sock.send(_SIMPLE.pack(_SIGNAL, 0, signum, 0))
        except BlockingIOError:  # hundreds of signals were not taken yet, or it has been stopped
            if signum == signal.SIGKILL:
                self._cause = self._cause or "signal"
                self.sandbox.kill()
            else:
                self._timers.append(self._loop.call_later(_AGAIN_S, self.signal, signum))
        except (BrokenPipeError, ConnectionResetError):
            pass  # gone between two messages: its end is on the way to us

    def end(self, cause: str) -> None:
        """Ends the whole tree: SIGTERM, a short grace, SIGKILL; ``cause`` becomes the reason."""
        if self._ended or self._cause:
            return
        self._cause = cause
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        self._timers.append(self._loop.call_later(KILL_GRACE_S, self.signal, signal.SIGKILL))
        self._timers.append(
            self._loop.call_later(KILL_GRACE_S + _OUR_KILL_DELAY_S, self.sandbox.kill)
        )

    def kill_tree(self) -> None:
        """SIGKILL to everything, by the sandbox's first process, or else by the launcher."""
        self.signal(signal.SIGKILL)
        if not self._ended:
            self._timers.append(self._loop.call_later(_OUR_KILL_DELAY_S, self.sandbox.kill))

    def end_now(self, cause: str) -> None:
        """The same without grace, from outside."""
        if not self._ended:
            self._cause = self._cause or cause
            self._shut_doors()
            self.sandbox.kill()

    # A terminal, or standard input.

    def _take_terminal(self, terminal: Terminal, fd: int, device: int) -> None:
        self._pipes[1] = fd
        self._stdin = terminal.take(fd, device)
        self._listen(1)

    def resize(self, rows: int, cols: int) -> None:
        if self._terminal is not None and 1 in self._pipes:
            self._terminal.resize(self._pipes[1], rows, cols)

    def feed_stdin(self, data: bytes) -> None:
        if self._stdin is not None:
            self._stdin.feed(data)

    async def drain_stdin(self) -> None:
        if self._stdin is not None:
            await self._stdin.drain()

    def close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close()


def _no_room(exc: OSError) -> Failed:
    """For what a sandbox has sent and this process could not take."""
    hint = "raise the limit on open files (ulimit -n)" if exc.errno == errno.EMFILE else ""
    code = f"spawn-{errno.errorcode.get(exc.errno or 0, 'unknown')}"
    return Failed("spawn", f"descriptors of the sandbox: {exc.strerror}", code, hint)


def _read_only(fd: int) -> int:
    """The same file, opened for reading only."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _widen(pipe: int) -> None:
    """Lets a pipe hold more, for a command that writes much: it is woken less often."""
    with contextlib.suppress(PermissionError):  # this user's pipes hold as much as they may
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _WIDE)


def _settle(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
