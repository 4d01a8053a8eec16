"""One command in one sandbox: from a prepared sandbox to its end.

Everything here happens in callbacks of the event loop: no thread, no task, no polling. Each
descriptor has one owner at a time: pipes' far ends are closed as soon as they were sent.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import signal
import struct
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._linux.failures import explain
from union.sandbox._linux.hand_over import HAS_STDIN, HAS_WAIT, hand_over, read_only_memfd
from union.sandbox._linux.launcher import receive
from union.sandbox._linux.output_pipes import UNATTACHED, OutputPipes
from union.sandbox._linux.prepared import FAILED, MESSAGE_BYTES, SIMPLE, Sandbox, close_all
from union.sandbox._linux.stdin import StdinPipe
from union.sandbox._linux.terminal import Terminal
from union.sandbox.constants import KILL_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._linux.command import Command
    from union.sandbox._session.transport import Sink

__all__ = ["READY", "LocalRun", "NotBuiltError"]

_SIGNAL: Final = 31
READY, _STARTED, _EXITED, _TERMINAL = 40, 41, 42, 45
_EXIT = struct.Struct("=IiQQQ")
_MOST_DOORS: Final = 8
_AGAIN_S: Final = 0.1
_OUR_KILL_DELAY_S: Final = 2.0
"""How long the sandbox's first process may take to obey before it is killed from outside."""


class _GarbledError(Exception):
    """The sandbox's first process said what it never says: it is not to be believed any more."""


class NotBuiltError(BrokenPipeError):
    """A command could not be handed over because its sandbox could not be built."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(errno.EPIPE, failed.reason)
        self.failed = failed


class LocalRun:
    """A command in flight (the Run protocol), feeding a Sink."""

    def __init__(self, sandbox: Sandbox, *, isolation: Isolation) -> None:
        self._loop = asyncio.get_running_loop()
        self.isolation = isolation
        self.sandbox = sandbox
        self._ears = sandbox.line.ears
        self._sink: Sink = UNATTACHED
        self._output = OutputPipes(self._ears, UNATTACHED)
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
        self.on_doors: Callable[[list[int]], None] = close_all
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
        given: dict[int, int] = {} if wait is None else {HAS_WAIT: wait}
        """Far ends by the bit of their purpose."""
        try:
            if (far := self._make_stdin(stdin)) is not None:
                given[HAS_STDIN] = far
            for fd, wanted in enumerate(pipes, start=1):
                if wanted:
                    near, given[1 << fd] = self.sandbox.pipe()
                    self._output.add(fd, near)
            window = None if self._terminal is None else self._terminal.window
            hand_over(
                self.sandbox.sock, command, given, report=self.started is not None, window=window
            )
        finally:
            close_all(given.values())
            self.sandbox.drop_pipes()

    def attach(self, sink: Sink, *, timeout_s: float | None) -> None:
        """Begin to receive reports about the command; `listen` begins to read its output.

        After an exception the command is killed, and the run has ended.
        """
        self._sink = self._output.sink = sink
        try:
            self._ears.add(self.sandbox.sock.fileno(), self._on_message)
        except BaseException:
            self._give_up()
            raise
        if timeout_s is not None:
            self._timers.append(self._loop.call_later(timeout_s, self.end, "timeout"))

    def _give_up(self) -> None:
        """End a command that was handed over and cannot be followed."""
        self._ended = True
        self.sandbox.kill()
        self._output.release()
        self._end_all()

    def give_up_killed(self) -> None:
        """End the run of a command that was killed from outside and does not end."""
        if not self._ended:
            self._fail(
                Failed("stream", "a process of the command cannot be killed", "close-incomplete")
            )

    def discard(self) -> None:
        """Lets an unused sandbox and its pipes go; nobody listens to it."""
        self.sandbox.let_go()
        if self._stdin is not None:
            self._stdin.drop()
        self._output.discard()

    def _make_stdin(self, stdin: bytes | str | None) -> int | None:
        owner = self.sandbox.owner
        if isinstance(stdin, bytes):
            return read_only_memfd("stdin", stdin, owner=owner)
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
            self._break_off(Failed("stream", "the sandbox sent a malformed message"))
        except OSError as exc:  # no descriptor for what came, or for what must be made of it
            self._break_off(_no_room(exc))
        except Exception:
            # A fault of ours must end this run, not repeat for each of its messages.
            self._break_off(Failed("stream", "a message of the sandbox could not be handled"))
            raise

    def _take_messages(self) -> None:
        while not self._ended:
            try:
                data, fds = receive(self.sandbox.sock, MESSAGE_BYTES, _MOST_DOORS)
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
                close_all(fds)  # none comes with anything else
                self._take_word(kind, data)

    def _take_word(self, kind: int, data: bytes) -> None:
        try:
            if kind == _STARTED:
                pid = SIMPLE.unpack(data)[2]
                self._sink.event(Started(pid))
                _settle(self.started)
            elif kind == _EXITED:
                self._on_exit(*_EXIT.unpack(data)[1:])
            elif kind == FAILED:
                _, where, error, _ = SIMPLE.unpack_from(data)
                self.failure = (where, error)
                self._fail(explain(where, error, self._program, data[SIMPLE.size :]))
            else:
                raise _GarbledError
        except struct.error as exc:
            raise _GarbledError from exc

    def _on_exit(self, status: int, user_us: int, system_us: int, maxrss_kib: int) -> None:
        if not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            raise _GarbledError
        self._drain_output()
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

    def _drain_output(self) -> None:
        if self._terminal is not None:
            self._terminal.let_go()
        self._output.drain()

    def _on_lost(self) -> None:
        """The first process ended without a word: it, or everything, was killed."""
        out_of_memory = self.sandbox.was_out_of_memory()
        if out_of_memory or self._cause:
            self._drain_output()
            usage = Usage(peak_memory_bytes=self.sandbox.peak_memory())
            cause = "oom" if out_of_memory else self._cause
            self._finish(Exited(128 + signal.SIGKILL, cause, usage))
        else:
            self._fail(Failed("stream", "the sandbox ended without reporting how"))

    def _break_off(self, failed: Failed) -> None:
        """End a run that cannot go on, whatever its first process does."""
        self.sandbox.kill()
        if self._ended:
            self._output.abandon()
        else:
            self._fail(failed)

    def _fail(self, failed: Failed) -> None:
        self._output.release()
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
        self._output.close_ended()
        if self._stdin is not None:
            self._stdin.drop()
        if self._terminal is not None:
            self._terminal.let_go()
        _settle(self.started)
        _settle(self.finished)

    # Output.

    def listen(self) -> None:
        """Read output as it comes."""
        try:
            self._output.listen()
        except OSError as exc:
            self._break_off(_no_room(exc))

    def resume(self, fd: int) -> None:
        """Read a paused stream again."""
        try:
            self._output.resume(fd)
        except OSError as exc:
            self._break_off(_no_room(exc))

    def abandon(self) -> None:
        """The session closes: no reader will come."""
        self._output.abandon()

    # Signals and ends.

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to every process of the sandbox.

        Args:
            signum: the number of the signal.
            group: send it only to the command's own process group, as Ctrl-C at a terminal does.

        """
        if self._ended:
            return
        try:
            self.sandbox.sock.send(SIMPLE.pack(_SIGNAL, group, signum, 0))
        except BlockingIOError:  # hundreds of signals were not taken yet, or it has been stopped
            if signum == signal.SIGKILL and not group:
                self._cause = self._cause or "signal"
                self.sandbox.kill()
            else:
                again = functools.partial(self.signal, signum, group=group)
                self._timers.append(self._loop.call_later(_AGAIN_S, again))
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
        self._output.add(1, fd)
        self._stdin = terminal.take(fd, device)
        self._output.listen_to(1)

    def resize(self, rows: int, cols: int) -> None:
        near = self._output.near_ends.get(1)
        if self._terminal is not None and near is not None:
            self._terminal.resize(near, rows, cols)

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


def _settle(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
