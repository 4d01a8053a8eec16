"""The resident launcher: found, started, spoken to, replaced when it died.

Rules of this file:

- One launcher per host process, started on first use; a forked copy of the host starts its own.
- Nothing is ever forked from this process: the launcher is spawned by vfork, with an empty
  environment and no descriptor but its control socket and a pidfd of ours.
- A session's channel is the life line of all it started: closing it kills everything behind it.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import errno
import os
import platform
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._linux import causes, inherited
from union.sandbox.errors import BackendUnavailableError, SandboxExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox._linux.reader_set import Ears
    from union.sandbox._plan.plan import Plan

__all__ = [
    "BINARY",
    "Channel",
    "Launcher",
    "NamespaceRefusedError",
    "receive",
    "sealed_memfd",
    "send_with_fds",
]

BINARY: Final = Path(__file__).parent / "bin" / "sandbox-launcher"

_ATTACH, _USERNS = 1, 2
_PREPARE, _KILL, _KILL_ALL = 10, 11, 12
_GONE, _ALL_GONE, _USERNS_READY, _PID, _DRAINING = 20, 21, 22, 23, 24
_DENY_SETGROUPS, _NOTIFY, _MAP_IDS, _TELL_PID, _WRAPPED, _COPY = 1, 2, 4, 8, 16, 32
_FAILED = 43
_SIMPLE = struct.Struct("=IIii")
_PREPARE_MSG = struct.Struct("=12I")
_PATIENCE_S: Final = 10.0
"""For an answer that takes a millisecond; a launcher that owes it for so long has been stopped."""
_AGAIN_S: Final = 0.1
_CONFIRM_S: Final = 10.0
_NAMESPACES_KEPT: Final = 16
_DRAIN_S: Final = 30.0
"""For the end of all processes of a session, which may be many. One that has not ended by then
waits for a device, or for a file system that does not answer, and cannot be killed."""


_FD_SIZE: Final = array.array("i").itemsize
_CUT, _CLOEXEC = int(socket.MSG_CTRUNC), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """One message with descriptors; they stay the caller's."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """One message with its descriptors, all of them: fewer than were sent is EMFILE, and none.

    The kernel drops what a process at its limit has no room for, and only sets a flag.
    """
    data, control, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(most * _FD_SIZE), _CLOEXEC)
    fds = _descriptors(control) if control else []
    if flags & _CUT:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, fds


def sealed_memfd(name: str, content: bytes, *, owner: int | None = None) -> int:
    """A descriptor of an unchangeable file in memory."""
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if owner is not None:
            os.fchown(fd, owner, owner)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)  # shrink, grow, write, and sealing itself
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


class NamespaceRefusedError(OSError):
    """The kernel, or a filter over it, made no user namespace."""


class Launcher:
    """The launcher process of this host process."""

    _current: ClassVar[Launcher | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        _check_binary()
        self.pid_of_host = os.getpid()
        me = _pidfd(self.pid_of_host)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            os.close(me)
            raise
        try:
            self._process = subprocess.Popen(
                ["sandbox"],  # noqa: S607 - what processes inside see as the name of process 1
                executable=BINARY,
                stdin=theirs.fileno(),
                stdout=me,
                stderr=subprocess.DEVNULL,
                env={},
                close_fds=True,
            )
        except OSError as exc:
            ours.close()
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                raise  # it says nothing about the launcher
            raise _cannot_start(exc) from exc
        finally:
            theirs.close()
            os.close(me)
        self._control = ours
        self.reset_error: OSError | None = None
        """Why inherited limits could not be reset; then no sandbox may be used."""
        try:
            inherited.reset(self._process.pid)
        except PermissionError as exc:
            # A missing namespace explains more: this is reported only if nothing else fails.
            self.reset_error = exc
        except BaseException:
            ours.close()
            self.give_up()
            raise
        atexit.register(self._end_with_host)
        self._control.settimeout(_PATIENCE_S)
        self._userns: dict[tuple[int, int, int, int], int] = {}

    @classmethod
    def current(cls) -> Launcher:
        """The running launcher; starts one if there is none or it has died."""
        with cls._lock:
            if cls._current is not None and not cls._current.is_usable():
                cls._current.forget()
                cls._current = None
            if cls._current is None:
                cls._current = Launcher()
            return cls._current

    def is_usable(self) -> bool:
        """Whether it runs and is ours: in a forked copy of the host it belongs to the parent."""
        return self.pid_of_host == os.getpid() and self._process.poll() is None

    def forget(self) -> None:
        atexit.unregister(self._end_with_host)
        self._control.close()
        for fd in self._userns.values():
            os.close(fd)
        # The Popen of another process's child must not complain that it was never waited for.
        self._process.returncode = self._process.returncode or 0

    def _end_with_host(self) -> None:
        """At interpreter exit: let go, and wait until the launcher has ended everything."""
        if os.getpid() == self.pid_of_host:
            self._control.close()
            try:
                self._process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.give_up()

    def give_up(self) -> None:
        """Ends a launcher that does not answer, and with it everything it has started."""
        if self.is_usable():
            self._process.kill()
            self._process.wait()

    def why_it_ended(self) -> OSError:
        """What is known about the end of a launcher."""
        with self._lock:
            return self._why_it_ended()

    def _why_it_ended(self) -> OSError:
        kind, error = 0, 0
        try:
            self._control.settimeout(0)
            kind, _, error, _ = _SIMPLE.unpack(self._control.recv(_SIMPLE.size))
            self._control.settimeout(_PATIENCE_S)
        except (OSError, struct.error):
            pass  # it was killed, or another session has noticed before
        if kind == _FAILED:
            return OSError(error, f"the launcher could not set itself up: {os.strerror(error)}")
        return OSError(errno.EPIPE, "the launcher has ended, or was killed")

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(self) -> socket.socket:
        """A channel for one session."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock:
                send_with_fds(self._control, _SIMPLE.pack(_ATTACH, 0, 0, 0), [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def userns(self, *, inside: tuple[int, int], outside: tuple[int, int]) -> int:
        """A user namespace that maps one (uid, gid) to another; the caller owns the descriptor.

        The last few are kept: a session often gets the id of one that has just been closed.
        """
        key = (*inside, *outside)
        with self._lock:
            fd = self._userns.pop(key, -1)
            if fd < 0:
                fd = self._make_userns(key)
            self._userns[key] = fd  # the youngest is the last
            while len(self._userns) > _NAMESPACES_KEPT:
                os.close(self._userns.pop(next(iter(self._userns))))
            return os.dup(fd)

    def _make_userns(self, key: tuple[int, int, int, int]) -> int:
        uid_in, gid_in, uid_out, gid_out = key
        message = _PREPARE_MSG.pack(_USERNS, 0, 0, 0, uid_in, uid_out, gid_in, gid_out, *[0] * 4)
        try:
            self._control.send(message)
            data, fds = receive(self._control, _SIMPLE.size, 1)
        except TimeoutError as exc:
            # Its answer, should it come, would be taken for that to the next question.
            self.give_up()
            raise OSError(errno.ETIMEDOUT, "the launcher does not answer") from exc
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise self._why_it_ended() from exc
        if not data:
            raise self._why_it_ended()
        error = errno.EPROTO
        if len(data) == _SIMPLE.size:
            kind, _, error, _ = _SIMPLE.unpack(data)
            if kind == _USERNS_READY and not error and len(fds) == 1:
                return fds[0]
        for fd in fds:
            os.close(fd)
        if error == errno.EPROTO:
            self.give_up()
            raise OSError(error, "the launcher gave an answer that is none")
        raise NamespaceRefusedError(error, os.strerror(error))


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno != errno.ENOSYS:
            raise
        what, hint = causes.too_old()
        raise BackendUnavailableError(
            f"the native launcher does not work here: {what} (pidfd_open: {exc.strerror})",
            missing=("pidfd_open",),
            hint=hint,
        ) from exc


def _check_binary() -> None:
    if BINARY.is_file():
        return
    if platform.system() != "Linux":
        raise BackendUnavailableError(
            f"this backend needs Linux; this is {platform.system()}", missing=("linux",)
        )
    raise BackendUnavailableError(
        f"the native launcher was not built when this package was installed ({BINARY} is missing)",
        missing=("launcher",),
        hint="install a C compiler (Debian: apt-get install gcc libc6-dev) and reinstall: "
        "pip install --force-reinstall --no-binary unionai-sandbox unionai-sandbox",
    )


def _cannot_start(exc: OSError) -> BackendUnavailableError:
    if exc.errno == errno.ENOEXEC:
        return BackendUnavailableError(
            f"the native launcher was built for another architecture; this machine is "
            f"{platform.machine()}",
            missing=("launcher",),
            hint="reinstall the package on this machine: pip install --force-reinstall "
            "--no-binary unionai-sandbox unionai-sandbox",
        )
    return BackendUnavailableError(
        f"the native launcher {BINARY} could not be started: {exc.strerror}",
        missing=("launcher",),
        hint="is it executable, and on a file system mounted without noexec?"
        if exc.errno == errno.EACCES
        else "",
    )


def _after_fork() -> None:
    # Another thread may have held the lock at the moment of the fork.
    Launcher._lock = threading.Lock()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)


class Channel:
    """One session's line to the launcher, served by the session's event loop."""

    def __init__(self, ears: Ears) -> None:
        self.ears = ears
        self._loop = asyncio.get_running_loop()
        self._launcher, self._sock = _attached()
        self._refused: OSError | None = None
        self._ids = 0
        self._gone: dict[int, Callable[[], None]] = {}
        self._pids: dict[int, asyncio.Future[int]] = {}
        self._drained: dict[int, asyncio.Future[None]] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        """Of each drain: for the launcher's confirmation, then for the end of all processes."""
        self.lost = False
        try:
            ears.add(self._sock.fileno(), self._on_readable)
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
        on_gone: Callable[[], None] | None = None,
        pid: asyncio.Future[int] | None = None,
        budgets: tuple[int, int] = (0, 0),
    ) -> tuple[int, socket.socket]:
        """Begins a sandbox. Returns its number and the socket to its first process.

        ``budgets`` limit the processes and the queued signals of all sandboxes that begin with the
        same ``shared``.
        ``encoded`` is a descriptor of the encoded plan; ``shared`` are the namespaces that hold
        what it begins with; ``on_gone`` is called when every process of the sandbox has been
        reaped; ``pid`` becomes the number on the host of the process that all others descend from.
        """
        if self.lost:
            raise self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ids += 1
        number = self._ids
        flags = (_NOTIFY if on_gone is not None else 0) | (_TELL_PID if pid is not None else 0)
        flags |= (_WRAPPED if plan.is_wrapped else 0) | (_COPY if shared else 0)
        uid, gid = plan.uid or (0, 0), plan.gid or (0, 0)
        if plan.uid is not None:
            flags |= _MAP_IDS | (_DENY_SETGROUPS if plan.deny_setgroups else 0)
        message = _PREPARE_MSG.pack(
            _PREPARE,
            number,
            plan.clone_flags,
            flags,
            *uid,
            *gid,
            len(cgroups),
            plan.network,
            *budgets,
        )
        try:
            send_with_fds(self._sock, message, [theirs.fileno(), encoded, *cgroups, *fds, *shared])
        except BaseException as exc:
            ours.close()
            if isinstance(exc, BrokenPipeError | ConnectionResetError):
                self._hear_the_end()
                raise self.end() from exc
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
        """Whether there is a launcher behind it.

        One that was killed is not always missed at the line: what it was just making has a copy of
        its end, and holds that until it is told.
        """
        return not self.lost and self._launcher.is_usable()

    def end(self) -> OSError:
        """Why nothing can be asked of this line any more."""
        return self._refused or self._launcher.why_it_ended()

    def kill(self, number: int) -> bool:
        """Kills a sandbox from outside, whatever its first process does; False: nobody can."""
        if self.lost:
            return False
        try:
            self._sock.send(_SIMPLE.pack(_KILL, number, 0, 0))
        except BlockingIOError:  # hundreds of messages were not taken: it has been stopped
            self._loop.call_later(_AGAIN_S, self.kill, number)
        except OSError:
            self._hear_the_end()
            return False
        return True

    def drain(self) -> asyncio.Future[None]:
        """Kill everything of this session; done when every process has been reaped.

        The future fails with `SandboxExecutionError` (``close-incomplete``) if a process cannot be
        killed. Other sessions go on meanwhile.
        """
        done = self._loop.create_future()
        if self.lost:
            done.set_result(None)
            return done
        self._ids += 1
        self._drained[self._ids] = done
        try:
            self._sock.send(_SIMPLE.pack(_KILL_ALL, self._ids, 0, 0))
        except BlockingIOError:  # the last messages it will take; closing the line says the same
            self._launcher.give_up()
        except OSError:  # the launcher has died, and what it had started with it
            self._hear_the_end()
        if not done.done():
            # A launcher that does not even confirm has been stopped: every session of this process
            # waits for it in vain. It is replaced, and what it has started ends with it.
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
        self.lost = True  # a run that is still ending must not send on a closed socket
        if self._sock.fileno() >= 0:
            self.ears.remove(self._sock.fileno())
            self._sock.close()
        self._end_all()

    def _on_readable(self) -> None:
        while True:
            try:
                data = self._sock.recv(_SIMPLE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # ended with a message of ours unread; said once, what it sent still comes
            if len(data) != _SIMPLE.size:
                # Its end, or nonsense; closing the line kills whatever is behind it either way.
                self._on_lost()
                return
            kind, number, value, _ = _SIMPLE.unpack(data)
            if kind == _PID and (pid := self._pids.pop(number, None)) is not None:
                if not pid.done():
                    pid.set_result(value)
            elif kind == _DRAINING:
                self._on_draining(number)
            elif kind == _FAILED:
                self._refused = OSError(value, f"the launcher refuses: {os.strerror(value)}")
            elif kind == _GONE and (callback := self._gone.pop(number, None)) is not None:
                callback()
            elif kind == _ALL_GONE and (future := self._drained.pop(number, None)) is not None:
                _finish(future)

    def _hear_the_end(self) -> None:
        """Nobody takes our words any more. Those that were said before, such as why, are heard."""
        if not self.lost:
            self._on_readable()
        self._on_lost()

    def _on_lost(self) -> None:
        if self.lost:
            return
        self.lost = True
        self.ears.remove(self._sock.fileno())
        self._sock.close()
        self._end_all()

    def _end_all(self) -> None:
        """Nothing more will be said: everything behind this line is gone, or about to be."""
        for future in self._drained.values():
            _finish(future)
        for pid in self._pids.values():
            if not pid.done():
                pid.set_exception(self.end())
                pid.exception()  # whether or not anybody still waits for it
        self._pids.clear()
        callbacks, self._gone = tuple(self._gone.values()), {}
        for callback in callbacks:
            callback()


def _attached() -> tuple[Launcher, socket.socket]:
    """The launcher and a line to it; another one in the place of one that died just now."""
    launcher = Launcher.current()
    try:
        return launcher, launcher.attach()
    except (BrokenPipeError, ConnectionResetError):
        launcher.give_up()
    launcher = Launcher.current()
    try:
        return launcher, launcher.attach()
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise launcher.why_it_ended() from exc


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
