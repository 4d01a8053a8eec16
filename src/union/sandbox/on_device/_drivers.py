"""Start the driver of a Python context, and keep one started ahead inside its sandbox.

A waiting driver stops in the middle of Python's start, like a waiting Python: its own code is
loaded, the packages of the venv are not. It is used by one context only.
"""

from __future__ import annotations

import functools
import marshal
import socket
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._contexts import python_driver
from union.sandbox._linux.machine_run import new_run
from union.sandbox._linux.spares import Budget
from union.sandbox.on_device._start_hook import DRIVER, PRELOAD

if TYPE_CHECKING:
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._posture import Posture

__all__ = ["MAX_START_BYTES", "SpareDrivers", "begin", "driver_source", "start_driver"]

_SCRIPT: Final = f"import {DRIVER}\n{DRIVER}.main()\n".encode()
MAX_START_BYTES: Final = 60 * 1024


@functools.cache
def driver_source() -> bytes:
    """Return the program that runs the cells of a context."""
    return Path(python_driver.__file__).read_bytes()


def start_driver(
    sandbox: Sandbox, posture: Posture, command: Command, *, preload: tuple[str, ...]
) -> tuple[LocalRun, socket.socket]:
    """Start a Python that loads the driver and waits for ``begin``.

    Args:
        sandbox: a prepared sandbox.
        posture: its posture.
        command: the command of a Python script, without the script.
        preload: modules to import first.

    """
    run = new_run(sandbox, isolation=posture.isolation)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        near.setblocking(False)
        if preload:
            command = command.with_env(f"{PRELOAD}={','.join(preload)}")
        run.send(command, pipes=(True, True), wait=far.detach())
        near.send(driver_source())
    except BaseException:
        near.close()
        raise
    return run, near


def begin(near: socket.socket, command: Command) -> bool:
    """Let a driver continue with this environment; return False if it has ended."""
    environment = dict(item.split("=", 1) for item in command.env)
    payload = marshal.dumps((_SCRIPT, environment, command.cwd))
    try:
        near.send(payload)
    except OSError:
        return False
    return True


class _Waiting:
    """One waiting driver; its ticket in the budget is claimed exactly once."""

    def __init__(self, run: LocalRun, near: socket.socket, fingerprint: object) -> None:
        self.run = run
        self.near = near
        self.fingerprint = fingerprint
        self._ticket = Budget.add(self._discard)

    def _discard(self) -> None:
        self.near.close()
        self.run.discard()

    def release(self) -> None:
        if Budget.claim(self._ticket):
            self._discard()

    def take(self, command: Command, fingerprint: object) -> bool:
        """Start this driver; return False if it was discarded instead."""
        if not Budget.claim(self._ticket):
            return False
        if fingerprint != self.fingerprint or not begin(self.near, command):
            self._discard()
            return False
        return True


class SpareDrivers:
    """The waiting drivers of one session, by posture."""

    def __init__(self, *, keep: int, preload: tuple[str, ...]) -> None:
        self._keep = keep
        self.preload = preload
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
        """Start a driver that waits; return its run."""
        run, near = start_driver(sandbox, posture, command, preload=self.preload)
        self._waiting[posture].append(_Waiting(run, near, fingerprint))
        return run

    def take(
        self, posture: Posture, command: Command, fingerprint: object
    ) -> tuple[LocalRun, socket.socket] | None:
        """Return a driver that has begun, or None if none was available."""
        waiting = self._waiting[posture]
        if sum(map(len, command.env)) > MAX_START_BYTES:
            return None
        while waiting:
            one = waiting.popleft()
            if one.take(command, fingerprint):
                return one.run, one.near
        return None

    def release(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().release()
        self._waiting.clear()
