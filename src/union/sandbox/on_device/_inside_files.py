"""Start the helper that performs the file calls of a machine."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from union.sandbox._files.inside import InsideFiles
from union.sandbox._linux import host

if TYPE_CHECKING:
    from union.sandbox._core.events import Event
    from union.sandbox._linux.run import LocalRun
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox.on_device._runner import Runner

__all__ = ["inside_files"]


def inside_files(runner: Runner, *, work_dir: str) -> InsideFiles:
    """Return the file calls of a session that are performed inside; the first starts the helper."""
    return InsideFiles(functools.partial(_start, runner, work_dir), work_dir=work_dir)


@functools.cache
def _source() -> str:
    return Path(__file__).with_name("_inside_helper.py").read_text("utf-8")


async def _start(runner: Runner, work_dir: str) -> _Helper:
    # Isolated and without site-packages: it executes nothing that sandboxed code could write.
    python = host.interpreter().executable
    near, far = socket.socketpair()
    near.setblocking(False)
    try:
        argv = (python, "-I", "-S", "-c", _source(), work_dir)
        return _Helper(await runner.start_helper(argv, far, _Discard()), near)
    except BaseException:
        near.close()
        raise
    finally:
        far.close()


class _Helper:
    """A helper that runs (the HelperProcess protocol)."""

    def __init__(self, run: LocalRun, sock: socket.socket) -> None:
        self.sock = sock
        self._run = run

    def end(self) -> None:
        self._run.end_now("closed")


class _Discard:
    """The sink of a helper: nothing that it writes is kept."""

    def event(self, event: Event) -> None:
        """Do nothing: its end is seen at its socket."""

    def output(self, fd: int, data: bytes | memoryview) -> bool:  # noqa: ARG002 - of the protocol
        return True

    def end_of_output(self, fd: int) -> None:
        """Do nothing."""

    def decision(self, decision: Decision) -> None:
        """Do nothing: it has no network."""

    def request(self, request: HttpRequest) -> None:
        """Do nothing: it has no network."""
