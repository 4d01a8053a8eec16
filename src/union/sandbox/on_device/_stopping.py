"""The processes of a session that runs while its work dir is copied or restored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.open_files import open_for_writing
from union.sandbox._linux.stopped import StoppedProcesses
from union.sandbox._session import threads
from union.sandbox.errors import SandboxBusyError

if TYPE_CHECKING:
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._transport import LocalTransport

__all__ = ["busy", "processes_of"]


async def busy(transport: LocalTransport, count: int) -> SandboxBusyError:
    """Return the error for ``count`` commands and contexts that run."""
    work = transport.work
    files = await threads.files.run(work.tree, open_for_writing, work.tree, work.path)
    return SandboxBusyError(count, files)


async def processes_of(transport: LocalTransport, running: list[LocalRun]) -> StoppedProcesses:
    """Return the processes of a session; those that wait for commands are ended."""
    work = transport.work
    transport.pool.release()  # a waiting Python may have begun to write
    with work.tree.borrow_root(".") as top:
        found = os.fstat(top)
    located = [await run.sandbox.channel.locate(run.sandbox.number) for run in running]
    return StoppedProcesses(
        Launcher.current().pid,
        frozenset(located) - {0},
        work.path,
        (found.st_dev, found.st_ino),
    )
