"""Pythons that are started ahead of their script and wait for it inside their sandboxes.

A waiting Python stops in the middle of its own start (see ``_start_hook``), before it reads the
packages of the venv. Its script runs exactly as if it had been on the command line.
"""

from __future__ import annotations

import marshal
import os
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.machine_run import new_run
from union.sandbox._linux.spares import Budget
from union.sandbox.on_device._start_hook import PRELOAD

if TYPE_CHECKING:
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._posture import Posture

__all__ = ["WaitingPythons", "can_wait"]

_MAX_SCRIPT_BYTES: Final = 60 * 1024
"""The size that fits into a pipe at once; for a longer script a new Python is started."""
_BEFORE_START: Final = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "TZ", "SSL_")
"""Prefixes of variables that take effect at start: such a command gets a new Python."""


def can_wait(spec: RunSpec) -> bool:
    """Return whether a waiting Python can run this script."""
    return (
        spec.kind == "python"
        and spec.stdin is None
        and spec.pty is None
        # It was started with a pipe for each stream.
        and "devnull" not in {spec.stdout, spec.stderr}
        and len(spec.text) < _MAX_SCRIPT_BYTES
        and not any(name.startswith(_BEFORE_START) for name, _ in spec.env)
    )


class _Waiting:
    """One waiting Python; its ticket in the budget is claimed exactly once."""

    def __init__(self, run: LocalRun, go: int, fingerprint: object) -> None:
        self.run = run
        self.fingerprint = fingerprint
        self._go = go
        self._ticket = Budget.add(self._discard)

    def _discard(self) -> None:
        os.close(self._go)
        self.run.discard()

    def release(self) -> None:
        if Budget.claim(self._ticket):
            self._discard()

    def start(self, payload: bytes, fingerprint: object) -> bool:
        """Send the script; return False if this Python was discarded instead."""
        if not Budget.claim(self._ticket):
            return False
        if fingerprint != self.fingerprint:
            self._discard()
            return False
        try:
            written = os.write(self._go, payload)
        except OSError:
            written = 0
        if written != len(payload):
            self._discard()
            return False
        os.close(self._go)
        return True


class WaitingPythons:
    """The waiting Pythons of one session, by posture."""

    def __init__(self, *, keep: int, preload: tuple[str, ...]) -> None:
        self._keep = keep
        self._preload = preload
        self._waiting: defaultdict[Posture, deque[_Waiting]] = defaultdict(deque)

    @property
    def has_any(self) -> bool:
        """Whether one waits; it may still execute what earlier runs left in the venv."""
        return any(self._waiting.values())

    def runs(self) -> list[LocalRun]:
        """Return those that wait."""
        return [one.run for waiting in self._waiting.values() for one in waiting]

    def wants(self, posture: Posture) -> bool:
        return len(self._waiting[posture]) < self._keep

    def add(
        self, posture: Posture, sandbox: Sandbox, command: Command, fingerprint: object
    ) -> LocalRun:
        """Start a Python in a sandbox; ``command`` is that of a script, without the script."""
        run, go = self._start(posture, sandbox, command)
        self._waiting[posture].append(_Waiting(run, go, fingerprint))
        return run

    def _start(self, posture: Posture, sandbox: Sandbox, command: Command) -> tuple[LocalRun, int]:
        run = new_run(sandbox, isolation=posture.isolation)
        far, go = os.pipe()
        os.set_blocking(go, False)
        if self._preload:
            command = command.with_env(f"{PRELOAD}={','.join(self._preload)}")
        try:
            run.send(command, pipes=(True, True), wait=far)
        except OSError:
            os.close(go)
            raise
        return run, go

    def fork(self, posture: Posture, sandbox: Sandbox, command: Command) -> LocalRun | None:
        """Run this script in a sandbox that is forked now; None if it is too long."""
        payload = _payload(command)
        if payload is None:
            sandbox.release()
            return None
        run, go = self._start(posture, sandbox, command._replace(script=None))
        os.write(go, payload)
        os.close(go)
        return run

    def take(self, posture: Posture, command: Command, fingerprint: object) -> LocalRun | None:
        """Return a Python that has started this script, or None if none was available."""
        waiting = self._waiting[posture]
        payload = _payload(command) if waiting else None
        if payload is None:
            return None
        while waiting:
            one = waiting.popleft()
            if one.start(payload, fingerprint):
                return one.run
        return None

    def release(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().release()
        self._waiting.clear()


def _payload(command: Command) -> bytes | None:
    """Return what a waiting Python receives; None if that does not fit into a pipe."""
    if command.script is None:
        return None
    environment = dict(item.split("=", 1) for item in command.env)
    payload = marshal.dumps((command.script, environment, command.cwd))
    return payload if len(payload) <= _MAX_SCRIPT_BYTES else None
