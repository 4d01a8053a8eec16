"""The pool of one session: prepared sandboxes and started Pythons, ready for a command."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Final

from union.sandbox._core.paths import work_path
from union.sandbox._core.spec import RunSpec
from union.sandbox._linux.channel import Channel
from union.sandbox._linux.reader_set import ReaderSet
from union.sandbox.errors import SandboxError, SandboxExecutionError
from union.sandbox.on_device._pythons import WaitingPythons, can_wait
from union.sandbox.on_device._sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.command import Command
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
        self.is_bare = spec.backend == "none"
        """Whether the backend isolates nothing; then nothing is prepared ahead."""
        self._readers: ReaderSet | None = None
        self._channel: Channel | None = None
        self._in_a_row = (False, 0)
        """Whether the last commands were Python, and how many of them came in a row."""
        keep = 0 if self.is_bare else spec.warm
        self.sandboxes = Sandboxes(self.channel, keep=keep)
        self.pythons = WaitingPythons(keep=min(keep, 1), preload=spec.preload)

    # The channel.

    def reserve(self) -> None:
        """Open the file descriptor that closing needs, before any other."""
        self._readers = ReaderSet()

    def connect(self) -> None:
        """Open the channel to the launcher; ``reserve()`` comes first."""
        if self._readers is None:
            raise RuntimeError("the transport is not open")
        self._channel = Channel(self._readers)

    def channel(self) -> Channel:
        """Return a working channel: a new one if the launcher of the last one has died."""
        if self._channel is None or self._readers is None:
            raise RuntimeError("the transport is not open")
        if not self._channel.is_usable:
            # The sandboxes died with the launcher; the session itself can continue.
            self.release()
            self._channel.close()
            self._channel = Channel(self._readers)
            if not self.is_bare:
                self._channel.check_limits(self._spec.backend)
        return self._channel

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
        if spec.kind == "python" and not self.is_bare and can_wait(spec):
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
            # The spare died before it received the command, so a retry cannot run it twice.
            run = self.sandboxes.begin(posture, terminals=spec.pty is not None)
            self._send(run, spec, command)
        return run

    def _send(self, run: LocalRun, spec: RunSpec, command: Command) -> None:
        # run() waits for the start only if the start has something to report: the terminal, a
        # missing program or directory, or a pid that is not always the same.
        report = spec.pty is not None or spec.kind == "argv" or spec.cwd is not None or self.is_bare
        pipes = (spec.stdout != "devnull", spec.stderr != "devnull")
        run.send(command, pipes=pipes, stdin=spec.stdin, pty=spec.pty, report_start=report)

    def _waiting_python(
        self, posture: Posture, spec: RunSpec, command: Command, *, work: WorkDir, venv: Venv
    ) -> LocalRun | None:
        if spec.cwd is not None and not _is_dir(spec.cwd, work):
            return None
        return self.pythons.take(posture, command, venv.fingerprint())

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
            return self._fill(posture, spec, venv=venv, build=build)
        except OSError:
            # The next command prepares its own, and reports the error if that fails too.
            _log.debug("preparing a spare sandbox failed", exc_info=True)
            return False

    def _fill(
        self,
        posture: Posture,
        spec: RunSpec,
        *,
        venv: Venv,
        build: Callable[[RunSpec, Posture], Command],
    ) -> bool:
        is_python = spec.kind == "python"
        last, count = self._in_a_row
        self._in_a_row = (is_python, count + 1 if last is is_python else 1)
        if self._in_a_row[1] == _UNUSED:
            (self.sandboxes if is_python else self.pythons).release()
            self.sandboxes.touch()
        if not is_python:
            self.sandboxes.fill(posture)
            return False
        if posture.shape == "open" or not self.pythons.wants(posture) or not venv.is_unchanged():
            return False
        # A waiting Python executes what earlier runs left in the venv (.pth files), so it must not
        # have a network that a later, more restricted run lacks. The listeners of a filtered
        # network are not served before the command is sent.
        fingerprint = venv.fingerprint()
        plain = RunSpec(kind="python", env=self._spec.env, network=spec.network)
        command = build(plain, posture)._replace(script=None)
        ready = self.sandboxes.prepare(posture)
        run = self.pythons.add(posture, ready, command, fingerprint)
        # Watched from now on: it executes code of the venv before it has a command.
        self.sandboxes.watch_memory(run, posture.limits.memory_bytes)
        self.sandboxes.touch(self.pythons.release)
        return True

    def keep_first(self, posture: Posture) -> None:
        """Prepare the first spare of a posture that was built ahead of any command."""
        if self._spec.warm and self.sandboxes.is_open:
            self.sandboxes.keep(posture, self.sandboxes.prepare(posture))

    def release(self) -> None:
        """Release every spare."""
        self.sandboxes.release()
        self.pythons.release()


def _is_dir(cwd: str, work: WorkDir) -> bool:
    """Return whether a working directory surely exists; a new Python reports it if not."""
    try:
        work.tree.check_dir(work_path(cwd, work_dir=work.path, argument="cwd", allow_root=True))
    except SandboxError:
        return False
    return True
