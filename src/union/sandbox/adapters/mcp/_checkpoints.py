"""The tools for checkpoints, for sandboxes whose state is their work dir."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, Field

from union.sandbox._checkpoints.values import no_such_checkpoint
from union.sandbox.adapters.mcp._sandboxes import BoundedText
from union.sandbox.errors import SandboxBusyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._checkpoints.values import TreeChange
    from union.sandbox._session.checkpoint import Checkpoint
    from union.sandbox._session.session import Session
    from union.sandbox.adapters.mcp._sandboxes import Sandboxes
    from union.sandbox.adapters.mcp._tools import Registrar

__all__ = ["register_checkpoints"]

MAX_CHANGES: Final = 500
CheckpointId = Annotated[
    str, Field(min_length=1, max_length=64, description="The id that checkpoint returned.")
]
Label = Annotated[str, Field(max_length=200, description="Text that describes the state.")]
SandboxName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="The sandbox to use, by name.")
]


class CheckpointState(BaseModel):
    """A state of the work dir that rollback can restore."""

    id: str
    name: str
    created: str = Field(description="Time in UTC, ISO 8601.")
    size_bytes: int | None = Field(description="Bytes on disk; null if not counted yet.")


class CheckpointList(BaseModel):
    """All checkpoints, oldest first."""

    checkpoints: list[CheckpointState]


class Change(BaseModel):
    """A difference between a checkpoint and the work dir."""

    path: str
    action: str = Field(description="added, changed or deleted.")
    kind: str = Field(description="file, dir, symlink or other.")
    size: int
    diff: str | None = Field(description="Unified difference of a small text file.")


class Changes(BaseModel):
    """The differences between a checkpoint and the work dir, by path."""

    changes: list[Change]
    truncated: bool = Field(description="Whether changes or text were left out.")


class Restored(BaseModel):
    """A rollback that is complete."""

    id: str
    variables: str = Field(description="lost: the interpreter of run_code was ended.")


def _state(checkpoint: Checkpoint) -> CheckpointState:
    created = dt.datetime.fromtimestamp(checkpoint.created, dt.UTC)
    return CheckpointState(
        id=checkpoint.id,
        name=checkpoint.name,
        created=created.isoformat(timespec="seconds"),
        size_bytes=checkpoint.size_bytes,
    )


async def _find(session: Session, checkpoint_id: str) -> Checkpoint:
    for one in await session.checkpoints():
        if one.id == checkpoint_id:
            return one
    raise no_such_checkpoint(checkpoint_id)


def _shown(changes: Sequence[TreeChange]) -> Changes:
    is_cut, shown = len(changes) > MAX_CHANGES, []
    for one in changes[:MAX_CHANGES]:
        text = one.text
        if text is not None:
            kept = BoundedText()
            kept.add(text.encode("utf-8", "replace"))
            text, is_cut = kept.text(), is_cut or kept.is_cut
        path = one.path.encode("utf-8", "replace").decode()
        shown.append(Change(path=path, action=one.action, kind=one.kind, size=one.size, diff=text))
    return Changes(changes=shown, truncated=is_cut)


def register_checkpoints(add: Registrar, sandboxes: Sandboxes) -> None:
    """Add the tools for checkpoints."""

    @add.tool("Take a checkpoint")
    async def checkpoint(
        name: Label = "",
        *,
        end_running: Annotated[
            bool,
            Field(description="End the interpreter of run_code and started commands first."),
        ] = False,
        sandbox: SandboxName = "main",
    ) -> CheckpointState:
        """Keep the present state of all files and installed packages, to return to it later.

        What runs is stopped for a moment and goes on, at the cost of a copy of all files. With
        end_running it is ended first, and the variables of run_code are lost.
        """
        found = sandboxes.get(sandbox)
        session = await found.session.opened()
        if end_running:
            await found.end_running()
        try:
            return _state(await session.checkpoint(name))
        except SandboxBusyError as exc:
            exc.hint = "call checkpoint with end_running, which loses the variables of run_code"
            raise

    @add.tool("List checkpoints", read_only=True)
    async def list_checkpoints(sandbox: SandboxName = "main") -> CheckpointList:
        """List the checkpoints of the sandbox."""
        session = await sandboxes.get(sandbox).session.opened()
        return CheckpointList(checkpoints=[_state(one) for one in await session.checkpoints()])

    @add.tool("Compare with a checkpoint", read_only=True)
    async def diff_checkpoint(
        id: CheckpointId,  # noqa: A002 - the name that checkpoint returns
        sandbox: SandboxName = "main",
    ) -> Changes:
        """Return the files that were added, changed or deleted since a checkpoint."""
        session = await sandboxes.get(sandbox).session.opened()
        return _shown(await session.diff(id, content=True))

    @add.tool("Return to a checkpoint", destructive=True, idempotent=True)
    async def rollback(
        id: CheckpointId,  # noqa: A002 - the name that checkpoint returns
        sandbox: SandboxName = "main",
    ) -> Restored:
        """Restore the files of a checkpoint. Later changes are lost, and running code is ended."""
        found = sandboxes.get(sandbox)
        session = await found.session.opened()
        await _find(session, id)  # before anything is ended
        await found.end_running()
        await session.rollback(id)
        return Restored(id=id, variables="lost")

    @add.tool("Remove a checkpoint", destructive=True)
    async def drop_checkpoint(
        id: CheckpointId,  # noqa: A002 - the name that checkpoint returns
        sandbox: SandboxName = "main",
    ) -> CheckpointList:
        """Remove a checkpoint that is not needed any more, and list those that are left."""
        session = await sandboxes.get(sandbox).session.opened()
        await (await _find(session, id)).drop()
        return CheckpointList(checkpoints=[_state(one) for one in await session.checkpoints()])
