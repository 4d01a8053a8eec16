"""SessionCheckpoints: keep states of the work dir, return to them, compare with them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from union.sandbox._session.own_loop import foreign_loop, in_own_loop
from union.sandbox._session.session_files import SessionFiles
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import os

    from union.sandbox._checkpoints.values import CheckpointCalls, TreeChange
    from union.sandbox._contexts.context import Context
    from union.sandbox._contexts.values import ContextSnapshot
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._session.checkpoint import Checkpoint
    from union.sandbox._session.lifecycle import Lifecycle
    from union.sandbox._session.session import Session
    from union.sandbox._session.transport import Transport

__all__ = ["SessionCheckpoints"]


class SessionCheckpoints(SessionFiles):
    """Calls about checkpoints. ``Session`` inherits them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._saved: dict[str, tuple[tuple[Context, ContextSnapshot], ...]] = {}
        """The contexts that were saved with a checkpoint, by its id."""

    def _tracked(self, context: Context) -> Context:
        self._contexts.add(context)
        return context

    async def _forget_contexts(self, checkpoint_id: str) -> None:
        """Release the contexts that were saved with a checkpoint."""
        for context, snapshot in self._saved.pop(checkpoint_id, ()):
            if context.alive and snapshot.generation == context.generation:
                await context.discard(snapshot)

    def _open_contexts(self) -> list[Context]:
        """Return the contexts to save."""
        found = [context for context in self._contexts if context.alive]
        other = next((one.language for one in found if one.language != "python"), None)
        if other is not None:
            raise SandboxUsageError(
                f"a {other} context is open, which cannot be saved",
                argument="contexts",
                hint="close it first, or take the checkpoint without contexts=True",
            )
        return found

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
    async def checkpoint(self, name: str = "", *, contexts: bool = False) -> Checkpoint:
        """Keep the present state of the work dir, the venv included.

        ``rollback()`` restores exactly what is there when this returns. If commands or contexts
        run, they are stopped while the work dir is copied, and go on.

        Args:
            name: text of at most 200 characters that describes it; none by default.
            contexts: whether to save the open Python contexts too; ``rollback()`` then returns them
                to their variables instead of ending them. False by default.

        Raises:
            SandboxCellError: a context cannot be saved; see ``Context.save()``.
            SandboxBusyError: a process could not be stopped; ``files`` names those that are open
                for writing.

        """
        from union.sandbox._checkpoints.values import check_name

        check_name(name)
        saved: list[tuple[Context, ContextSnapshot]] = []
        try:
            if contexts:
                saved += [(one, await one.save()) for one in self._open_contexts()]
            info = await self._calls().checkpoint(name)
        except BaseException:
            for context, snapshot in saved:
                await context.discard(snapshot)
            raise
        made = self._as_checkpoint(info)
        self._saved[made.id] = tuple(saved)
        return made

    @in_own_loop
    async def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Return the work dir to a checkpoint. Everything since is gone.

        Commands and contexts that run are ended first: their memory does not match the files.
        Contexts that were saved with the checkpoint go on with the variables that they had.

        Args:
            checkpoint: a checkpoint of this session, or its id.

        Raises:
            ContextLostError: a context that was saved with it has ended; nothing has changed.

        """
        found = _id_of(checkpoint)
        saved = self._saved.get(found, ())
        for context, snapshot in saved:
            await context.restore(snapshot)
        kept = {context for context, _ in saved}
        for context in tuple(self._contexts) if saved else ():
            if context.alive and context not in kept:
                await context.close()
        await self._calls().rollback(found, keeps_contexts=bool(saved))

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
