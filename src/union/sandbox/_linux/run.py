"""One command in one sandbox: from a prepared sandbox to its end.

All work is done in callbacks of the event loop: no thread, no polling. Each descriptor has one
owner at a time: the far ends of pipes are closed as soon as they were sent.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._linux import reports
from union.sandbox._linux.connecting import Connect, answer_connect
from union.sandbox._linux.descriptors import close_all, receive
from union.sandbox._linux.hand_over import hand_over
from union.sandbox._linux.output_pipes import UNATTACHED, OutputPipes
from union.sandbox._linux.prepared import MAX_MESSAGE, NotBuiltError, Sandbox, kill_delay_s
from union.sandbox._linux.protocol import SIMPLE, ExecFlag, Limit, Message
from union.sandbox._linux.remedies import explain, no_descriptors, not_executed
from union.sandbox._linux.stdin import StdinPipe, open_stdin
from union.sandbox._linux.terminal import Terminal
from union.sandbox.constants import KILL_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._linux.command import Command
    from union.sandbox._session.transport import Sink

__all__ = ["LocalRun"]

_RETRY_S: Final = 0.1


class LocalRun:
    """A command in flight (the Run protocol), feeding a Sink."""

    def __init__(self, sandbox: Sandbox, *, isolation: Isolation) -> None:
        self._loop = asyncio.get_running_loop()
        self.isolation = isolation
        self._kill_s = kill_delay_s(isolation)
        self.sandbox = sandbox
        self._readers = sandbox.channel.readers
        self._sink: Sink = UNATTACHED
        self.output = OutputPipes(self._readers, UNATTACHED)
        self._stdin: StdinPipe | None = None
        self._terminal: Terminal | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._cause = ""
        self._program = ""
        self.has_ended = False
        self.started: asyncio.Future[None] | None = None
        """Done when the command has started or failed; None if no report was requested."""
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self.failure: tuple[int, int] | None = None
        self.on_listeners: Callable[[list[int]], None] = close_all
        self.on_connect: Connect | None = None
        self.close_listeners: Callable[[], Coroutine[None, None, None]] | None = None
        self._closing_listeners: asyncio.Task[None] | None = None

    def send(
        self,
        command: Command,
        *,
        pipes: tuple[bool, bool],
        merge: bool = False,
        stdin: bytes | str | int | None = None,
        wait: int | None = None,
        pty: tuple[int, int] | None = None,
        report_start: bool = False,
    ) -> None:
        """Send the command to the sandbox.

        After an OSError nothing was started, and all resources of the run have been released.

        Args:
            command: the command.
            pipes: whether stdout and stderr are read.
            merge: whether stderr is written to the pipe of stdout.
            stdin: content of stdin; a string: a pipe that `feed_stdin` writes to; a number: a copy
                of this descriptor; None: /dev/null.
            wait: descriptor that a program started ahead of its command waits on.
            pty: rows and columns of a terminal, which replaces the pipes.
            report_start: whether ``started`` becomes a future, done when the command runs and the
                terminal has arrived.

        """
        if pty is not None:
            self._terminal = Terminal(pty, None if isinstance(stdin, int) else stdin)
            pipes, stdin = (False, False), None
        if report_start:
            self.started = self._loop.create_future()
            self.output.hold()
        try:
            self._send(command, pipes, merge=merge, stdin=stdin, wait=wait)
        except (BrokenPipeError, ConnectionResetError) as exc:
            failure = self.sandbox.read_failure()
            self.discard()
            if failure is None:
                raise
            where, error, stderr = failure
            raise NotBuiltError(explain(where, error, self._program, stderr)) from exc
        except BaseException:
            self.discard()
            raise

    def _send(
        self,
        command: Command,
        pipes: tuple[bool, bool],
        *,
        merge: bool,
        stdin: bytes | str | int | None,
        wait: int | None,
    ) -> None:
        self._program = command.argv[0]
        given: dict[int, int] = {} if wait is None else {ExecFlag.WAIT: wait}
        """Far ends by their ExecFlag."""
        try:
            if stdin is not None:
                given[ExecFlag.STDIN], self._stdin = open_stdin(stdin, self.sandbox.owner)
            self.output.open(self.sandbox.pipe, given, pipes=pipes, merge=merge)
            window = None if self._terminal is None else self._terminal.window
            if self._terminal is not None and self.sandbox.terminal is not None:
                self._take_terminal(self._terminal, *self.sandbox.connect_terminal(given, window))
            report = self.started is not None
            hand_over(self.sandbox.sock, command, given, report=report, window=window)
        finally:
            close_all(given.values())
            self.sandbox.close_pipes()

    def attach(self, sink: Sink, *, timeout_s: float | None) -> None:
        """Begin to receive reports; after an exception the command is killed and the run ended."""
        self._sink = self.output.sink = sink
        try:
            self._readers.add(self.sandbox.sock.fileno(), self._on_message)
        except BaseException:
            self._give_up()
            raise
        if timeout_s is not None:
            self._timers.append(self._loop.call_later(timeout_s, self.end, "timeout"))

    def _give_up(self) -> None:  # a command that was sent but cannot be read from
        self.has_ended = True
        self.sandbox.kill()
        self.output.release()
        self._end_all()

    def give_up_killed(self) -> None:
        """End the run of a command that was killed from outside and does not end."""
        if not self.has_ended:
            self._fail(
                Failed("stream", "a process of the command cannot be killed", "close-incomplete")
            )

    def discard(self) -> None:
        """Release an unused sandbox and its pipes; any thread may do it."""
        self.sandbox.release()
        if self._stdin is not None:
            self._stdin.drop()
        self.output.discard()

    # Messages from the sandbox's first process.

    def _on_message(self) -> None:
        try:
            self._read_messages()
        except reports.MalformedReportError:
            self._break_off(Failed("stream", "the sandbox sent a malformed message"))
        except OSError as exc:  # no descriptor is left for those in the message
            self._break_off(no_descriptors(exc))
        except Exception:
            # A bug in a handler must end this run, not repeat for each of its messages.
            self._break_off(Failed("stream", "a message of the sandbox could not be handled"))
            raise

    def _read_messages(self) -> None:
        was_reset = False
        while not self.has_ended:
            try:
                data, fds = receive(self.sandbox.sock, MAX_MESSAGE, Limit.LISTENERS)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with a message of ours unread. Linux reports that once, before the
                # messages that it sent; gVisor after them, and then for every call.
                if was_reset:
                    self._on_lost()
                    return
                was_reset = True
                continue
            if not data:
                self._on_lost()
                return
            kind = int.from_bytes(data[:4], sys.byteorder)
            if kind == Message.READY:
                self.sandbox.read_label(data)
                self.on_listeners(fds)
            elif kind == Message.TERMINAL and self._terminal is not None and len(fds) == 2:
                self._take_terminal(self._terminal, *fds)
            else:
                close_all(fds)  # no other message carries descriptors
                self._dispatch(kind, data)

    def _dispatch(self, kind: int, data: bytes) -> None:
        if kind == Message.STARTED:
            self._on_started(reports.decode_started(data))
            _settle(self.started)
            self.output.begin()
        elif kind == Message.EXITED:
            code, usage = reports.decode_exited(data, peak_memory=self.sandbox.peak())
            self._drain_output()
            status = 128 - code if code < 0 else code
            oom = functools.partial(self.sandbox.ran_out_of_memory, status)
            self._finish(Exited(status, reports.end_reason(-code, self._cause, oom), usage))
        elif kind == Message.CONNECT and self.on_connect is not None:
            answer_connect(self.sandbox.sock, data, self.on_connect)
        elif kind == Message.MEMORY:
            self.sandbox.record_memory(*reports.decode_memory(data))
        elif kind == Message.FAILED:
            where, error, stderr = reports.decode_failed(data)
            self.failure = (where, error)
            ended = not_executed(where, error, self._program)
            if ended is None:
                self._fail(explain(where, error, self._program, stderr))
            else:
                self._exit_unstarted(*ended)
        else:
            raise reports.MalformedReportError

    def _on_started(self, pid: int) -> None:
        self._sink.event(Started(pid))

    def _exit_unstarted(self, code: int, message: str) -> None:
        """End the run of a program that cannot be executed, as a shell does."""
        if self.started is not None and not self.started.done():
            self._sink.event(Started(2))  # the pid inside that it would have
        self.output.add_line(message, "\r\n" if self._terminal else "\n")
        self._drain_output()
        self._finish(Exited(code, self._cause, Usage()))

    def _drain_output(self) -> None:
        if self._terminal is not None:
            self._terminal.release()
        self.output.drain()

    def _on_lost(self) -> None:
        """Handle a first process that ended without a report: it, or its tree, was killed."""
        out_of_memory = self.sandbox.ran_out_of_memory(128 + signal.SIGKILL)
        if out_of_memory or self._cause:
            self._drain_output()
            usage = Usage(peak_memory_bytes=self.sandbox.peak())
            cause = "oom" if out_of_memory else self._cause
            self._finish(Exited(128 + signal.SIGKILL, cause, usage))
        else:
            self._fail(Failed("stream", "the sandbox ended without reporting how"))

    def _break_off(self, failed: Failed) -> None:
        """End a run that cannot continue, whatever its first process does."""
        self.sandbox.kill()
        if self.has_ended:
            self.output.abandon()
        else:
            self._fail(failed)

    def _fail(self, failed: Failed) -> None:
        self.output.release()
        self._finish(failed)

    def _finish(self, end: Exited | Failed) -> None:
        # Streams that wait for their reader stay open; the rest of the run is over.
        self.has_ended = True
        self._shut_listeners()
        if self._closing_listeners is None:
            self._report(end)
        else:
            # The decisions for open connections are complete when these are closed.
            self._closing_listeners.add_done_callback(lambda _: self._report(end))

    def _shut_listeners(self) -> None:
        if self.close_listeners is not None and self._closing_listeners is None:
            self._closing_listeners = self._loop.create_task(self.close_listeners())

    def _report(self, end: Exited | Failed) -> None:
        self._sink.event(end)
        self._loop.call_soon(self._end_all)  # after the tasks that wait for this end

    def _end_all(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self.sandbox.sock.fileno() >= 0:
            self._readers.remove(self.sandbox.sock.fileno())
            self.sandbox.sock.close()
        self.output.close_ended()
        if self._stdin is not None:
            self._stdin.drop()
        if self._terminal is not None:
            self._terminal.release()
        _settle(self.started)
        _settle(self.finished)

    # Output.

    def listen(self) -> None:
        """Read output as it comes."""
        try:
            self.output.listen()
        except OSError as exc:
            self._break_off(no_descriptors(exc))

    def resume(self, fd: int) -> None:
        """Read a paused stream again."""
        try:
            self.output.resume(fd)
        except OSError as exc:
            self._break_off(no_descriptors(exc))

    # Signals and ends.

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to every process of the sandbox.

        Args:
            signum: the number of the signal.
            group: send it only to the command's own process group, as Ctrl-C at a terminal does.

        """
        if self.has_ended:
            return
        try:
            self.sandbox.sock.send(SIMPLE.pack(Message.SIGNAL, group, signum, 0))
        except BlockingIOError:  # the socket's queue is full: the first process is slow, or stopped
            if signum == signal.SIGKILL and not group:
                self._cause = self._cause or "signal"
                self.sandbox.kill()
            else:
                again = functools.partial(self.signal, signum, group=group)
                self._timers.append(self._loop.call_later(_RETRY_S, again))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just ended; its report is about to be received

    def end(self, cause: str) -> None:
        """End the whole tree: SIGTERM, a grace period, SIGKILL; ``cause`` becomes the reason."""
        if self.has_ended or self._cause:
            return
        self._cause = cause
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        self._timers.append(self._loop.call_later(KILL_GRACE_S, self.signal, signal.SIGKILL))
        self._timers.append(self._loop.call_later(KILL_GRACE_S + self._kill_s, self.sandbox.kill))

    def kill_tree(self) -> None:
        """Kill all processes, by the sandbox's first process, or else by the launcher."""
        self.signal(signal.SIGKILL)
        if not self.has_ended:
            self._timers.append(self._loop.call_later(self._kill_s, self.sandbox.kill))

    def end_now(self, cause: str) -> None:
        """Kill the sandbox from outside, without a grace period."""
        if not self.has_ended:
            self._cause = self._cause or cause
            self._shut_listeners()
            self.sandbox.kill()

    def _take_terminal(self, terminal: Terminal, fd: int, device: int) -> None:
        self.output.add(1, fd)
        self._stdin = terminal.take(fd, device)
        self.output.listen()

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal, if there is one."""
        near = self.output.near_ends.get(1)
        if self._terminal is not None and near is not None:
            self._terminal.resize(near, rows, cols)

    def feed_stdin(self, data: bytes) -> None:
        """Queue bytes for stdin."""
        if self._stdin is not None:
            self._stdin.feed(data)

    async def drain_stdin(self) -> None:
        """Wait until the pipe has taken what was queued."""
        if self._stdin is not None:
            await self._stdin.drain()

    def close_stdin(self) -> None:
        """End stdin after what was queued."""
        if self._stdin is not None:
            self._stdin.close()


def _settle(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
