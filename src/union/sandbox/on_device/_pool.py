"""The pool of one session: prepared sandboxes and started Pythons, ready for a command."""

from __future__ import annotations

import errno
import functools
import logging
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.registry import HOST_ROOT
from union.sandbox._core.paths import work_path
from union.sandbox._core.spec import RunSpec
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxError, SandboxExecutionError
from union.sandbox.on_device._drivers import SpareDrivers, begin, start_driver
from union.sandbox.on_device._engine import new_channel, new_readers
from union.sandbox.on_device._network import shape_of
from union.sandbox.on_device._pythons import WaitingPythons, can_wait
from union.sandbox.on_device._sandboxes import Sandboxes
from union.sandbox.on_device._template import Template

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.prepared import NotBuiltError
    from union.sandbox._linux.reader_set import ReaderSet
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._venv import Venv
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Pool"]

_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_PEER_GONE: Final = (errno.EPIPE, errno.ECONNRESET)
_UNUSED: Final = 64
"""After this many commands of one kind in a row, the pool releases the spares of the other kind:
while those exist, no network namespace of the session can be reused (native/network.c)."""
_log = logging.getLogger("union.sandbox")


class Pool:
    """Own the channel to the launcher and the spares that were prepared through it."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self.backend = spec.backend
        self.is_bare = spec.backend == "none" or not IS_LINUX
        """Whether commands see the host's own paths; then nothing is prepared ahead."""
        self.uses_host_root = self.is_bare or spec.backend in HOST_ROOT
        """Whether commands see the host's own root, so that no Python waits in a private one."""
        self._readers: ReaderSet | None = None
        self._channel: Channel | None = None
        self._in_a_row = (False, 0)
        """Whether the last commands were Python, and how many of them came in a row."""
        self.is_machine = spec.persist == "machine"
        self.is_served = False
        """Whether another process follows the commands of the session."""
        self.on_late_python: Callable[[], None] = lambda: None
        """Called when a Python was started after ``fill()`` or ``fill_driver()`` had returned."""
        # In a machine, other commands would see a waiting Python, and could end it.
        no_pythons = self.uses_host_root or self.is_machine
        keep = 0 if self.is_bare else spec.warm
        self.sandboxes = Sandboxes(self._last_channel, keep=keep)
        preload = spec.preload or ()
        self.pythons = WaitingPythons(keep=0 if no_pythons else min(keep, 1), preload=preload)
        self.drivers = SpareDrivers(keep=0 if no_pythons else min(keep, 1), preload=preload)
        self.template = Template(preload)

    # The channel.

    def reserve(self) -> None:
        """Open the file descriptor that closing needs, before any other."""
        self._readers = new_readers()

    def connect(self) -> None:
        """Open the channel to the launcher; ``reserve()`` comes first."""
        if self._readers is None:
            raise RuntimeError("the transport is not open")
        self._channel = new_channel(self._readers)

    def channel(self) -> Channel:
        """Return a working channel: a new one if the launcher of the last one has died."""
        if self._channel is None or self._readers is None:
            raise RuntimeError("the transport is not open")
        if not self._channel.is_usable:
            # The sandboxes died with the launcher; the session itself can continue.
            self.release()
            self._channel.close()
            self._channel = new_channel(self._readers)
            if not self.is_bare:
                self._channel.check_limits(self._spec.backend)
        return self._channel

    def _last_channel(self) -> Channel:
        """Return the channel without a system call; each command calls ``channel()`` before."""
        channel = self._channel
        return self.channel() if channel is None or channel.lost else channel

    @property
    def opened_channel(self) -> Channel | None:
        """The channel as it is, lost or not; None before ``connect()``."""
        return self._channel

    def disconnect(self) -> None:
        """Close the channel and the file descriptor that ``reserve()`` opened."""
        if self._channel is not None:
            self._channel.close()
        if self._readers is not None:
            self._readers.close()

    def spawn_failed(self, what: str, exc: OSError) -> SandboxExecutionError:
        """Return the error for a command or a session that could not be started."""
        if exc.errno == errno.ECHILD and self._channel is not None and self._channel.lost:
            exc = self._channel.end_reason()  # the launcher died, and its end is the cause
        why = exc.strerror or str(exc)
        if exc.errno in _PEER_GONE and why == os.strerror(exc.errno):
            why = "its sandbox ended before it received it"
        return SandboxExecutionError(
            f"{what}: {why}",
            backend=self._spec.backend,
            stage="spawn",
            code=f"spawn-{errno.errorcode.get(exc.errno or 0, 'unknown')}",
            hint="raise the limit on open files (ulimit -n), or close sessions that are done"
            if exc.errno in _NO_DESCRIPTORS
            else "",
        )

    def not_built(self, exc: NotBuiltError) -> SandboxExecutionError:
        """Return the error for a sandbox that could not be built."""
        failed = exc.failed
        return SandboxExecutionError(
            failed.reason,
            backend=self._spec.backend,
            stage=failed.stage,
            code=failed.code,
            hint=failed.hint,
        )

    # Taking.

    def hand_over(
        self, posture: Posture, spec: RunSpec, command: Command, *, work: WorkDir, venv: Venv
    ) -> LocalRun:
        """Send the command to a spare Python or sandbox, or to a sandbox prepared now."""
        self.channel()  # releases the spares of a lost channel
        if spec.call is not None:
            run = self.sandboxes.begin(posture, terminals=spec.pty is not None)
            self._send(run, spec, command)
            return run
        if spec.kind == "python" and not self.uses_host_root and can_wait(spec):
            waited = self._waiting_python(posture, spec, command, work=work, venv=venv)
            if waited is not None:
                return waited
        if spec.pty is None:
            run = self.sandboxes.take(posture)
        else:
            run = self.sandboxes.begin(posture, terminals=True)
        try:
            self._send(run, spec, command)
        except (BrokenPipeError, ConnectionResetError):
            # The spare died before it received the command, so a retry cannot run it twice. The
            # launcher may have died with it.
            self.channel()
            run = self.sandboxes.begin(posture, terminals=spec.pty is not None)
            self._send(run, spec, command)
        return run

    def _send(self, run: LocalRun, spec: RunSpec, command: Command) -> None:
        # run() waits for the start only if the start has something to report: the terminal, a
        # missing program or directory, or a pid that is not always the same.
        report = (
            spec.pty is not None
            or spec.kind == "argv"
            or spec.cwd is not None
            or self.uses_host_root
            or (self.is_machine and self._lacks_pid(run, spec))
        )
        pipes = (spec.stdout != "devnull", spec.stderr != "devnull")
        if run.sandbox.variables:
            command = command.with_variables(run.sandbox.variables)
        run.send(
            command,
            pipes=pipes,
            merge=spec.merged,
            stdin=spec.stdin,
            pty=spec.pty,
            report_start=report,
        )

    def _lacks_pid(self, run: LocalRun, spec: RunSpec) -> bool:
        """Return whether the pid of a machine's command is needed before its end, and unknown."""
        if not self.is_served and not _is_followed(spec):
            return False
        return shape_of(spec.network) == "filtered" or not run.sandbox.read_waiting()

    def _waiting_python(
        self, posture: Posture, spec: RunSpec, command: Command, *, work: WorkDir, venv: Venv
    ) -> LocalRun | None:
        if spec.cwd is not None and not _is_dir(spec.cwd, work):
            return None
        run = self.pythons.take(posture, command, venv.fingerprint())
        if run is not None or posture.shape == "open":
            return run
        number = self.template.number(posture)
        if number == 0:
            return None
        return self.pythons.fork(posture, self.sandboxes.prepare(posture, template=number), command)

    # Filling.

    def fill(
        self,
        posture: Posture,
        spec: RunSpec,
        *,
        venv: Venv,
        build: Callable[[RunSpec, Posture], Command],
    ) -> bool:
        """Prepare a spare sandbox or Python for a command like ``spec``.

        Returns whether a Python was started, which may change the venv before it waits.
        """
        try:
            is_python = spec.kind == "python" and not (self.uses_host_root or self.is_machine)
            last, count = self._in_a_row
            self._in_a_row = (is_python, count + 1 if last is is_python else 1)
            if self._in_a_row[1] == _UNUSED:
                (self.sandboxes if is_python else self.pythons).release()
                self.sandboxes.touch()
            if is_python:
                return self._fill_python(posture, spec, venv=venv, build=build)
            self.sandboxes.fill(posture)
        except OSError:
            # The next command prepares its own, and reports the error if that fails too.
            _log.debug("preparing a spare sandbox failed", exc_info=True)
        return False

    def _fill_python(
        self,
        posture: Posture,
        spec: RunSpec,
        *,
        venv: Venv,
        build: Callable[[RunSpec, Posture], Command],
    ) -> bool:
        if posture.shape == "open" or not self.pythons.wants(posture) or not venv.is_unchanged():
            return False

        def again() -> bool:
            # This is not a command, so it is not counted; and after many others in a row, a Python
            # is not wanted any more.
            is_python, count = self._in_a_row
            is_unused = not is_python and count >= _UNUSED
            return not is_unused and self._fill_python(posture, spec, venv=venv, build=build)

        number = self._template_for(posture, again)
        if number is None:
            return False
        # A waiting Python executes what earlier runs left in the venv (.pth files), so it must not
        # have a network that a later, more restricted run lacks. The listeners of a filtered
        # network are not served before the command is sent.
        fingerprint = venv.fingerprint()
        plain = RunSpec(kind="python", env=self._spec.env, network=spec.network)
        command = build(plain, posture)._replace(script=None)
        ready = self.sandboxes.prepare(posture, template=number)
        run = self.pythons.add(posture, ready, command, fingerprint)
        # Watched from now on: it executes code of the venv before it has a command.
        self.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        self.sandboxes.touch(self.release_pythons)
        return True

    # Contexts.

    def start_driver(
        self, posture: Posture, command: Command, *, venv: Venv
    ) -> tuple[LocalRun, socket.socket]:
        """Return a Python that has begun to run the driver of a context, and its socket."""
        self.channel()
        waited = self.drivers.take(posture, command, venv.fingerprint())
        if waited is not None:
            return waited
        sandbox = self.sandboxes.prepare(posture, template=self.template.number(posture))
        run, near = start_driver(sandbox, posture, command, preload=self.drivers.preload)
        if not begin(near, command):
            near.close()
            run.discard()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return run, near

    def fill_driver(self, posture: Posture, command: Command, *, venv: Venv) -> bool:
        """Start a driver ahead of the next context; return whether one was started."""
        try:
            if not self.drivers.wants(posture) or not venv.is_unchanged():
                return False
            again = functools.partial(self.fill_driver, posture, command, venv=venv)
            number = self._template_for(posture, again)
            if number is None:
                return False
            fingerprint = venv.fingerprint()
            sandbox = self.sandboxes.prepare(posture, template=number)
            run = self.drivers.add(posture, sandbox, command, fingerprint)
        except OSError:
            _log.debug("starting a spare driver failed", exc_info=True)
            return False
        self.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        self.sandboxes.touch(self.release_pythons)
        return True

    def _template_for(self, posture: Posture, on_ready: Callable[[], bool]) -> int | None:
        """Return the template to fork a spare from: 0 for none, None to wait for ``on_ready``.

        ``on_ready`` returns whether it has started a Python.
        """
        number = self.template.number(posture)
        if number or not self.template.is_worthwhile:
            return number

        def fill() -> None:
            try:
                if self.sandboxes.is_open and on_ready():
                    self.on_late_python()
            except OSError:
                _log.debug("preparing a spare Python failed", exc_info=True)

        starts = self.template.start(posture, self.channel(), fill)
        return None if starts and self.template.is_slow else 0

    def release_pythons(self) -> None:
        """Release every waiting Python and driver, and a template that starts quickly."""
        self.pythons.release()
        self.drivers.release()
        if not self.template.is_slow:
            self.template.release()

    def keep_first(self, posture: Posture) -> None:
        """Prepare the first spare of a posture that was built ahead of any command."""
        if self.template.is_slow and self.sandboxes.is_open:
            self.template.start(posture, self.channel(), lambda: None)
        if self._spec.warm and self.sandboxes.is_open:
            self.sandboxes.keep(posture, self.sandboxes.prepare(posture))

    def release(self) -> None:
        """Release every spare."""
        self.sandboxes.release()
        self.release_pythons()
        self.template.release()


def _is_followed(spec: RunSpec) -> bool:
    """Return whether ``run()`` returns before the command ends, so that its pid may be read."""
    return spec.background or not {spec.stdout, spec.stderr} <= {"collect", "devnull"}


def _is_dir(cwd: str, work: WorkDir) -> bool:
    """Return whether a working directory surely exists; a new Python reports it if not."""
    try:
        work.tree.check_dir(work_path(cwd, work_dir=work.path, argument="cwd", allow_root=True))
    except SandboxError:
        return False
    return True
