"""SessionCheckpoints: keep states of the work dir, return to them, compare with them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from union.sandbox._session.own_loop import foreign_loop, in_own_loop
from union.sandbox._session.session_files import SessionFiles
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import os

    from union.sandbox._checkpoints.values import CheckpointCalls, TreeChange
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._session.checkpoint import Checkpoint
    from union.sandbox._session.session import Session
    from union.sandbox._session.transport import Transport

__all__ = ["SessionCheckpoints"]


class SessionCheckpoints(SessionFiles):
    """Calls about checkpoints. ``Session`` inherits them."""

    @property
    def isolation(self) -> Isolation:
        """The isolation layers, verified on a live sandbox when the session was opened.

        ``layers`` is what the work dir is made of at present.
        """
        report = self._lifecycle.isolation
        layers = getattr(self._lifecycle.transport, "layers", report.layers)
        return report if layers == report.layers else dataclasses.replace(report, layers=layers)

    def _live_transport(self) -> Transport:
        """Return the transport of the open session, in whatever loop it is."""
        transport = self._lifecycle.transport
        if self._lifecycle.state != "open" or transport is None:
            transport = self._live()  # raises the reason
        return transport

    def _calls(self) -> CheckpointCalls:
        from union.sandbox._checkpoints.values import calls_of

        return calls_of(self._live())

    @in_own_loop
    async def checkpoint(self, name: str = "") -> Checkpoint:
        """Keep the present state of the work dir, the venv included.

        ``rollback()`` restores exactly what is there when this returns. If commands or contexts
        run, they are stopped while the work dir is copied, and go on.

        Args:
            name: text of at most 200 characters that describes it; none by default.

        Raises:
            SandboxBusyError: a process could not be stopped; ``files`` names those that are open
                for writing.

        """
        from union.sandbox._checkpoints.values import check_name

        return self._as_checkpoint(await self._calls().checkpoint(check_name(name)))

    @in_own_loop
    async def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Return the work dir to a checkpoint. Everything since is gone.

        Commands and contexts that run are ended first: their memory does not match the files.

        Args:
            checkpoint: a checkpoint of this session, or its id.

        """
        await self._calls().rollback(_id_of(checkpoint))

    @in_own_loop
    async def diff(
        self, checkpoint: Checkpoint | str, *, content: bool = False
    ) -> tuple[TreeChange, ...]:
        """Return the differences between a checkpoint and the work dir, sorted by path.

        The venv's own files are left out; installed packages are not. Times and owners are not
        compared.

        Args:
            checkpoint: a checkpoint of this session, or of the session that it was forked from.
            content: whether to add the unified difference of small text files; False by default.

        """
        return await self._calls().diff(_id_of(checkpoint), content=content)

    @in_own_loop
    async def adopt(self, other: Session) -> Checkpoint:
        """Replace the work dir by the present one of another session, such as a fork.

        Commands of this session are ended first; ``other`` goes on unchanged.

        Args:
            other: an open session of this process, or of the same server.

        Returns:
            The checkpoint of the state that was adopted.

        Raises:
            SandboxBusyError: a process of ``other`` could not be stopped.

        """
        if foreign_loop(other) is not None:
            raise SandboxUsageError(
                "adopt() needs a session of the same event loop",
                argument="other",
                hint="export() a checkpoint of the other session and import_checkpoint() it here",
            )
        transport = other._live_transport()  # noqa: SLF001 - of the same class
        return self._as_checkpoint(await self._calls().adopt(transport))

    @in_own_loop
    async def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of the session, oldest first, with their sizes."""
        return tuple(map(self._as_checkpoint, await self._calls().checkpoints()))

    @in_own_loop
    async def import_checkpoint(self, path: str | os.PathLike[str], name: str = "") -> Checkpoint:
        """Make a checkpoint of an archive that ``Checkpoint.export()`` has written.

        The work dir does not change: use ``rollback()`` or ``fork()``.

        Args:
            path: a tar archive on the host.
            name: text that describes it; none by default.

        """
        from union.sandbox._checkpoints.values import check_name
        from union.sandbox._session.archives import read_chunks

        info = await self._calls().import_checkpoint(check_name(name), read_chunks(path))
        return self._as_checkpoint(info)

    def _as_checkpoint(self, info: object) -> Checkpoint:
        from union.sandbox._session.checkpoint import Checkpoint

        return Checkpoint(self, info)  # type: ignore[arg-type]


def _id_of(checkpoint: Checkpoint | str) -> str:
    found = checkpoint if isinstance(checkpoint, str) else getattr(checkpoint, "id", None)
    if not isinstance(found, str):
        raise SandboxUsageError(
            f"checkpoint must be a Checkpoint or its id, not {checkpoint!r:.80}",
            argument="checkpoint",
        )
    return found
