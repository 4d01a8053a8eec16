"""A session's channel to the launcher.

The channel owns everything that was started through it: when it is closed, the launcher kills all
of its sandboxes.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._linux.descriptors import message_pair, send_with_fds
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.protocol import PREPARE, SIMPLE, Message, PrepareFlag
from union.sandbox._plan.template import Template
from union.sandbox.errors import BackendUnavailableError, SandboxExecutionError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from union.sandbox._linux.reader_set import ReaderSet
    from union.sandbox._plan.plan import Plan

__all__ = ["Channel"]

_RETRY_S: Final = 0.1
_CONFIRM_S: Final = 10.0
"""For the launcher's confirmation that it kills a session's processes."""
_DRAIN_S: Final = 30.0
"""For the end of all processes of a session, which may be many. A process that still exists then
waits for a device, or for a file system that does not answer, and cannot be killed."""


class Channel:
    """One session's channel to the launcher, read in the session's event loop."""

    launcher: ClassVar[type[Launcher]] = Launcher

    def __init__(self, readers: ReaderSet) -> None:
        self.readers = readers
        self._loop = asyncio.get_running_loop()
        self._launcher, self._sock = _attach(self.launcher)
        self._refused: OSError | None = None
        self._ids = 0
        self._gone: dict[int, Callable[[], None]] = {}
        self._pids: dict[int, asyncio.Future[int]] = {}
        self._drained: dict[int, asyncio.Future[None]] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        """Of each drain: for the launcher's confirmation, then for the end of all processes."""
        self.lost = False
        try:
            readers.add(self._sock.fileno(), self._on_readable)
        except BaseException:
            self._sock.close()
            raise

    def check_limits(self, backend: str) -> None:
        """Raise if the launcher, and with it every sandbox, keeps limits of the caller."""
        if self._launcher.reset_error is not None:
            raise BackendUnavailableError(
                f"limits of the caller cannot be reset: {self._launcher.reset_error}",
                backend=backend,
                missing=("prlimit",),
                hint="allow prlimit64 for processes of the same user in the seccomp profile",
            )

    def prepare(
        self,
        plan: Plan,
        encoded: int,
        *,
        cgroups: Sequence[int] = (),
        fds: Sequence[int] = (),
        shared: Sequence[int] = (),
        join: bool = False,
        on_gone: Callable[[], None] | None = None,
        pid: asyncio.Future[int] | None = None,
        budgets: tuple[int, int] = (0, 0),
        template: int = 0,
    ) -> tuple[int, socket.socket]:
        """Begin a sandbox. Return its number and the socket to its first process.

        Args:
            plan: the plan to perform.
            encoded: descriptor of a file with the encoded plan.
            cgroups: descriptors of the ``cgroup.procs`` files that the sandbox joins.
            fds: descriptors that the plan refers to by index.
            shared: user and mount namespace that the sandbox begins with a copy of.
            join: ``shared`` are the namespaces of a machine, which the sandbox joins.
            on_gone: called when every process of the sandbox has been reaped.
            pid: receives the pid, on the host, of the process that all others descend from.
            budgets: limits on the processes and on the queued signals of all sandboxes that begin
                with the same ``shared``; 0: no limit.
            template: number of the template that the sandbox is a fork of; 0: none.

        """
        if self.lost:
            raise self.end_reason()
        ours, theirs = message_pair()
        self._ids += 1
        number = self._ids
        uid, gid = plan.uid or (0, 0), plan.gid or (0, 0)
        message = PREPARE.pack(
            Message.PREPARE,
            number,
            plan.clone_flags,
            _flags(
                plan,
                notify=on_gone is not None,
                pid=pid is not None,
                copy=bool(shared),
                join=join,
            )
            | (PrepareFlag.FORK if template else 0),
            *uid,
            *gid,
            len(cgroups),
            plan.network,
            *budgets,
            template,
        )
        try:
            send_with_fds(self._sock, message, [theirs.fileno(), encoded, *cgroups, *fds, *shared])
        except BaseException as exc:
            ours.close()
            if isinstance(exc, BrokenPipeError | ConnectionResetError):
                self._drain_and_lose()
                raise self.end_reason() from exc
            raise
        finally:
            theirs.close()
        if on_gone is not None:
            self._gone[number] = on_gone
        if pid is not None:
            self._pids[number] = pid
        ours.setblocking(False)
        return number, ours

    @property
    def is_usable(self) -> bool:
        """Whether the launcher behind the channel runs.

        The channel alone does not always show that the launcher was killed: a sandbox that was
        being made has a copy of the launcher's end, and holds it until it notices.
        """
        return not self.lost and self._launcher.is_usable()

    def end_reason(self) -> OSError:
        """Return the reason why the channel can no longer be used."""
        return self._refused or self._launcher.end_reason()

    def kill(self, number: int) -> bool:
        """Kill a sandbox from outside. Return False if the launcher is gone."""
        if self.lost:
            return False
        try:
            self._sock.send(SIMPLE.pack(Message.KILL, number, 0, 0))
        except BlockingIOError:  # the socket's queue is full: the launcher has been stopped
            self._loop.call_later(_RETRY_S, self.kill, number)
        except OSError:
            self._drain_and_lose()
            return False
        return True

    async def locate(self, number: int) -> int:
        """Return the pid, on this host, of a sandbox's first process; 0 if it is gone.

        The pid is not reused before the launcher has reaped the process: if a second call returns
        the same, it was that of the sandbox all the time in between.
        """
        if self.lost:
            return 0
        pid = self._pids.get(number)
        if pid is None:
            pid = self._pids[number] = self._loop.create_future()
            try:
                self._sock.send(SIMPLE.pack(Message.LOCATE, number, 0, 0))
            except BlockingIOError as exc:  # the socket's queue is full: the launcher has stopped
                del self._pids[number]
                raise self._launcher.end_reason() from exc
            except OSError:
                self._drain_and_lose()
        try:
            return await asyncio.shield(pid)
        except OSError:
            return 0  # the launcher has died, and the sandbox with it

    def drain(self) -> asyncio.Future[None]:
        """Kill all processes of this session. The future is done when each has been reaped.

        It fails with `SandboxExecutionError` (``close-incomplete``) if a process cannot be killed.
        Other sessions are not affected.
        """
        done = self._loop.create_future()
        if self.lost:
            done.set_result(None)
            return done
        self._ids += 1
        self._drained[self._ids] = done
        try:
            self._sock.send(SIMPLE.pack(Message.KILL_ALL, self._ids, 0, 0))
        except BlockingIOError:  # the launcher has stopped reading; its end has the same effect
            self._launcher.give_up()
        except OSError:  # the launcher has died, and its sandboxes with it
            self._drain_and_lose()
        if not done.done():
            # A launcher that does not even confirm has been stopped, and blocks every session of
            # this process. It is killed, which ends its sandboxes, and replaced.
            number = self._ids
            self._deadlines[number] = self._loop.call_later(_CONFIRM_S, self._launcher.give_up)
            done.add_done_callback(lambda _: self._deadlines.pop(number).cancel())
        return done

    def _on_draining(self, number: int) -> None:
        done = self._drained.get(number)
        if done is not None and not done.done():
            self._deadlines[number].cancel()
            self._deadlines[number] = self._loop.call_later(_DRAIN_S, _fail, done)

    def close(self) -> None:
        """Close the channel, which makes the launcher kill everything behind it."""
        self.lost = True  # a run that is still ending must not send on a closed socket
        if self._sock.fileno() >= 0:
            self.readers.remove(self._sock.fileno())
            self._sock.close()
        self._end_all()

    def _on_readable(self) -> None:
        was_reset = False
        while True:
            try:
                data = self._sock.recv(SIMPLE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The launcher ended with a message of ours unread. Linux reports that once, before
                # the messages that it sent; gVisor after them, and then for every call.
                if was_reset:
                    self._on_lost()
                    return
                was_reset = True
                continue
            if len(data) != SIMPLE.size:
                # End of file, or a malformed message: in both cases the channel is closed, which
                # kills everything behind it.
                self._on_lost()
                return
            self._dispatch(*SIMPLE.unpack(data)[:3])

    def _dispatch(self, kind: int, number: int, value: int) -> None:
        if kind == Message.PID and (pid := self._pids.pop(number, None)) is not None:
            if not pid.done():
                pid.set_result(value)
        elif kind == Message.DRAINING:
            self._on_draining(number)
        elif kind == Message.FAILED:
            self._refused = OSError(value, f"the launcher refuses: {os.strerror(value)}")
        elif kind == Message.GONE and (callback := self._gone.pop(number, None)) is not None:
            callback()
        elif kind == Message.ALL_GONE and (done := self._drained.pop(number, None)) is not None:
            _finish(done)

    def _drain_and_lose(self) -> None:
        """Handle a launcher that stopped reading; drain what it sent, which may explain why."""
        if not self.lost:
            self._on_readable()
        self._on_lost()

    def _on_lost(self) -> None:
        if self.lost:
            return
        self.lost = True
        self.readers.remove(self._sock.fileno())
        self._sock.close()
        self._end_all()

    def _end_all(self) -> None:
        """Complete all that waits: the processes behind this channel are gone, or about to be."""
        for future in self._drained.values():
            _finish(future)
        for pid in self._pids.values():
            if not pid.done():
                pid.set_exception(self.end_reason())
                pid.exception()  # mark it as retrieved, whether or not a task still awaits it
        self._pids.clear()
        callbacks, self._gone = tuple(self._gone.values()), {}
        for callback in callbacks:
            callback()


def _flags(plan: Plan, *, notify: bool, pid: bool, copy: bool, join: bool) -> int:
    flags = PrepareFlag.NOTIFY if notify else 0
    flags |= PrepareFlag.REPORT_PID if pid else 0
    flags |= PrepareFlag.WRAPPED if plan.is_wrapped else 0
    flags |= PrepareFlag.COPY if copy else 0
    flags |= PrepareFlag.JOIN if join else 0
    flags |= PrepareFlag.TEMPLATE if plan.steps and isinstance(plan.steps[-1], Template) else 0
    if plan.uid is not None:
        flags |= PrepareFlag.MAP_IDS
        flags |= PrepareFlag.DENY_SETGROUPS if plan.deny_setgroups else 0
    return flags


def _attach(kind: type[Launcher]) -> tuple[Launcher, socket.socket]:
    """Return the launcher and a channel to it; replace a launcher that has just died."""
    launcher = kind.current()
    try:
        return launcher, launcher.attach()
    except (BrokenPipeError, ConnectionResetError):
        launcher.give_up()
    launcher = kind.current()
    try:
        return launcher, launcher.attach()
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise launcher.end_reason() from exc


def _fail(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(
            SandboxExecutionError(
                f"processes of the session are still there {_DRAIN_S:g} s after they were killed",
                stage="stream",
                code="close-incomplete",
                hint="a process in state D waits for a device or a network file system and ends "
                "when that answers; the session is closed, and nothing else waits for it",
            )
        )


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
