"""SessionProcesses: the processes of a session that keeps them between commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._session.own_loop import in_own_loop
from union.sandbox._session.session_files import SessionFiles
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._session.lifecycle import Lifecycle

__all__ = ["SessionProcesses"]


class SessionProcesses(SessionFiles):
    """Calls about processes. ``Session`` inherits them."""

    if TYPE_CHECKING:
        _lifecycle: Lifecycle

    @property
    def shell(self) -> str:
        """The path, inside the sandbox, of the shell that runs commands given as text."""
        return self._lifecycle.shell

    @in_own_loop
    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of the session, those that ended commands left behind included.

        Only with ``persist="machine"``: in other sessions, the processes of a command end with it.

        Raises:
            SandboxUsageError: the session has ``persist="workdir"``.

        """
        return await self._live().processes()

    @in_own_loop
    async def stop_process(self, pid: int) -> bool:
        """End one process: SIGTERM, a short grace period, SIGKILL. Return whether it existed.

        Its children go on. To end a command with everything it has started, use its handle.

        Args:
            pid: ``ProcessInfo.pid`` of a process that `processes` lists.

        Raises:
            SandboxUsageError: the session has ``persist="workdir"``.

        """
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 2:
            raise SandboxUsageError(
                f"pid must be the id of a process of the session, not {pid!r}",
                argument="pid",
                hint="await session.processes() lists them",
            )
        return await self._live().stop_process(pid)
