"""The resident launcher process: started at first use, replaced when it died.

Rules of this file:

- One launcher per host process, started on first use; a forked copy of the host starts its own.
- Nothing is ever forked from this process: the launcher is spawned by vfork, with an empty
  environment and no descriptor but its control socket and a pidfd of ours.
"""

from __future__ import annotations

import atexit
import errno
import os
import platform
import struct
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._linux import inherited, remedies
from union.sandbox._linux.descriptors import close_all, message_pair, receive, send_with_fds
from union.sandbox._linux.protocol import FAILURE_NAMES, PREPARE, SIMPLE, Message, operation
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    import socket

__all__ = ["BINARY", "LIBRARY", "Launcher", "NamespaceRefusedError", "Process"]

BINARY: Final = Path(__file__).parent / "bin" / "sandbox-launcher"
LIBRARY: Final = BINARY.with_name("sandbox-template.so")
"""The launcher's code as a library, which a template loads."""

_REPLY_TIMEOUT_S: Final = 10.0
"""For a reply that takes a millisecond; a launcher that is so late has been stopped."""
_MAX_NAMESPACES: Final = 16


Process = subprocess.Popen[bytes]


class NamespaceRefusedError(OSError):
    """The kernel, or a system-call filter, refused to create a user namespace."""


class Launcher:
    """The launcher process of this host process."""

    _current: ClassVar[Launcher | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        _check_binary(self.binary())
        self.pid_of_host = os.getpid()
        ours, theirs = message_pair()
        try:
            self._process = self._start(theirs)
        except OSError as exc:
            ours.close()
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                raise  # not a property of the launcher
            raise _cannot_start(self.binary(), exc) from exc
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours
        self.reset_error: OSError | None = None
        """Why inherited limits could not be reset; then no sandbox may be used."""
        try:
            self._reset_inherited(self._process.pid)
        except PermissionError as exc:
            # A missing namespace explains more: this is reported only if nothing else fails.
            self.reset_error = exc
        except BaseException:
            ours.close()
            self.give_up()
            raise
        atexit.register(self._end_with_host)
        self._control.settimeout(_REPLY_TIMEOUT_S)
        self._userns: dict[tuple[int, int, int, int], int] = {}

    def _start(self, control: socket.socket) -> Process:
        me = _pidfd(self.pid_of_host)
        try:
            return self._spawn(control, stdout=me)
        finally:
            os.close(me)

    def _spawn(self, control: socket.socket, *, stdout: int) -> Process:
        return subprocess.Popen(
            ["sandbox"],  # noqa: S607 - the name of process 1 inside
            executable=self.binary(),
            stdin=control.fileno(),
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            env={},
            close_fds=True,
        )

    def _reset_inherited(self, pid: int) -> None:
        inherited.reset(pid)

    @classmethod
    def binary(cls) -> Path:
        """Return the path of the launcher's program."""
        return BINARY

    @classmethod
    def current(cls) -> Launcher:
        """Return the running launcher; start one if there is none or it has died."""
        with cls._lock:
            if cls._current is not None and not cls._current.is_usable():
                cls._current.forget()
                cls._current = None
            if cls._current is None:
                cls._current = cls()
            return cls._current

    def is_usable(self) -> bool:
        """Return whether it runs and is ours: in a forked copy of the host it is the parent's."""
        if self.pid_of_host != os.getpid() or self._process.returncode is not None:
            return False
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:  # without the locks of Popen.poll(), as every command asks
            if os.waitid(os.P_PID, self._process.pid, ended) is None:
                return True
        except ChildProcessError:
            pass  # the host program ignores SIGCHLD, or waits for every child itself
        return self._process.poll() is None

    def forget(self) -> None:
        """Close the descriptors of a launcher that has ended or belongs to the parent process."""
        atexit.unregister(self._end_with_host)
        self._control.close()
        for fd in self._userns.values():
            os.close(fd)
        # The Popen of another process's child must not warn that it was never waited for.
        self._process.returncode = self._process.returncode or 0

    def _end_with_host(self) -> None:
        """At interpreter exit: close the control socket and wait until all sandboxes have ended."""
        if os.getpid() == self.pid_of_host:
            self._control.close()
            try:
                self._process.wait(timeout=_REPLY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.give_up()

    def give_up(self) -> None:
        """Kill a launcher that does not reply, and with it everything it has started."""
        if self.is_usable():
            self._process.kill()
            self._process.wait()

    def end_reason(self) -> OSError:
        """Return the reason why the launcher ended, as far as it reported one."""
        with self._lock:
            return self._end_reason()

    def _end_reason(self) -> OSError:
        kind, where, error = 0, 0, 0
        try:
            # Without waiting: a launcher that is still there has nothing to report.
            self._control.settimeout(0)
            kind, where, error, _ = SIMPLE.unpack(self._control.recv(SIMPLE.size))
        except (OSError, struct.error):
            pass  # it was killed, or another session has read the reason before
        finally:
            if self._control.fileno() >= 0:
                self._control.settimeout(_REPLY_TIMEOUT_S)
        if kind == Message.FAILED:
            name = FAILURE_NAMES.get(operation(where), f"step {where}")
            return OSError(error, f"the launcher failed: {name}: {os.strerror(error)}")
        return OSError(errno.EPIPE, "the launcher has ended or was killed")

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def attach(self) -> socket.socket:
        """Return the host's end of a new channel, for one session."""
        ours, theirs = message_pair()
        try:
            with self._lock:
                send_with_fds(
                    self._control, SIMPLE.pack(Message.ATTACH, 0, 0, 0), [theirs.fileno()]
                )
        except BaseException:
            ours.close()
            raise
        finally:
            self._sent(ours, theirs)
        ours.setblocking(False)
        return ours

    def _sent(self, ours: socket.socket, theirs: socket.socket) -> None:  # noqa: ARG002
        """Close the end of a channel that was sent to the launcher."""
        theirs.close()

    def userns(self, *, inside: tuple[int, int], outside: tuple[int, int]) -> int:
        """Return a user namespace that maps one (uid, gid) to another; the caller closes it.

        The last few are kept: a session often gets the id of one that was just closed.
        """
        key = (*inside, *outside)
        with self._lock:
            fd = self._userns.pop(key, -1)
            if fd < 0:
                fd = self._make_userns(key)
            self._userns[key] = fd  # the most recently used is last
            while len(self._userns) > _MAX_NAMESPACES:
                os.close(self._userns.pop(next(iter(self._userns))))
            return os.dup(fd)

    def _make_userns(self, key: tuple[int, int, int, int]) -> int:
        uid_in, gid_in, uid_out, gid_out = key
        message = PREPARE.pack(Message.USERNS, 0, 0, 0, uid_in, uid_out, gid_in, gid_out, *[0] * 5)
        try:
            self._control.send(message)
            data, fds = receive(self._control, SIMPLE.size, 1)
        except TimeoutError as exc:
            # A late reply would be mistaken for the reply to the next request.
            self.give_up()
            raise OSError(errno.ETIMEDOUT, "the launcher does not reply") from exc
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise self._end_reason() from exc
        if not data:
            raise self._end_reason()
        error = errno.EPROTO
        if len(data) == SIMPLE.size:
            kind, _, error, _ = SIMPLE.unpack(data)
            if kind == Message.USERNS_READY and not error and len(fds) == 1:
                return fds[0]
        close_all(fds)
        if error == errno.EPROTO:
            self.give_up()
            raise OSError(error, "the launcher sent a malformed reply")
        raise NamespaceRefusedError(error, os.strerror(error))


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno != errno.ENOSYS:
            raise
        what, hint = remedies.too_old()
        raise BackendUnavailableError(
            f"the native launcher does not work here: {what} (pidfd_open: {exc.strerror})",
            missing=("pidfd_open",),
            hint=hint,
        ) from exc


def _check_binary(binary: Path) -> None:
    if binary.is_file():
        return
    raise BackendUnavailableError(
        f"the native launcher was not built when this package was installed ({binary} is missing)",
        missing=("launcher",),
        hint="install a C compiler (Debian: apt-get install gcc libc6-dev) and reinstall: "
        "pip install --force-reinstall --no-binary unionai-sandbox unionai-sandbox",
    )


def _cannot_start(binary: Path, exc: OSError) -> BackendUnavailableError:
    if exc.errno == errno.ENOEXEC:
        return BackendUnavailableError(
            f"the native launcher was built for another architecture; this machine is "
            f"{platform.machine()}",
            missing=("launcher",),
            hint="reinstall the package on this machine: pip install --force-reinstall "
            "--no-binary unionai-sandbox unionai-sandbox",
        )
    return BackendUnavailableError(
        f"the native launcher {binary} could not be started: {exc.strerror}",
        missing=("launcher",),
        hint="make it executable, and install it on a file system that is not mounted noexec"
        if exc.errno == errno.EACCES
        else "",
    )


def _after_fork() -> None:
    # Another thread may have held the lock at the moment of the fork.
    Launcher._lock = threading.Lock()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)
