"""Values of checkpoints, and the calls that a transport offers for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable

    from union.sandbox._core.files import FileKind

__all__ = [
    "CheckpointCalls",
    "CheckpointInfo",
    "CheckpointLimits",
    "Fork",
    "TreeChange",
    "calls_of",
    "check_name",
    "no_such_checkpoint",
]

LayerKind = Literal["plain", "overlay", "overlay-tmpfs", "copy"]
ChangeAction = Literal["added", "changed", "deleted"]
MAX_NAME: Final = 200
MAX_CHECKPOINTS: Final = 1000
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The description of one checkpoint."""

    id: str
    """Chosen by the session; unique among its checkpoints."""
    name: str
    """The name that the caller gave; empty for none."""
    created: float
    """Seconds since the epoch."""
    kind: LayerKind
    """``overlay``, ``overlay-tmpfs`` or ``copy``; see ``Isolation.layers``."""
    took_s: float
    """Seconds that ``checkpoint()`` took."""
    size_bytes: int | None = None
    """Bytes on disk since the checkpoint before it; None until they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChange:
    """One difference between a checkpoint and the work dir."""

    path: str
    """Relative to the work dir; bytes that are not UTF-8 are kept by ``surrogateescape``."""
    action: ChangeAction
    """``added``, ``changed`` or ``deleted``."""
    kind: FileKind
    """``file``, ``dir``, ``symlink`` or ``other``; of a deleted entry, what it was."""
    size: int
    """Bytes; of a deleted entry, as it was."""
    mode: int
    """Permission bits; of a deleted entry, as they were."""
    old_kind: FileKind | None = None
    """The kind before; None for an added entry."""
    old_size: int | None = None
    """Bytes before; None for an added entry."""
    old_mode: int | None = None
    """Permission bits before; None for an added entry."""
    text: str | None = None
    """With ``content=True``, the unified difference of a small text file; otherwise None."""


class CheckpointLimits(NamedTuple):
    """Limits on the checkpoints of one session."""

    number: int = MAX_CHECKPOINTS
    size: int | None = None
    """Bytes on disk of all of them together; None for no limit."""


class Fork(NamedTuple):
    """What opens a fork."""

    make: Callable[[], object]
    """Makes its transport."""
    session_id: str | None = None
    """The id of the session, if its server will know it by one."""


class CheckpointCalls(Protocol):
    """The calls about checkpoints that a transport offers."""

    async def checkpoint(self, name: str) -> CheckpointInfo: ...

    async def rollback(self, checkpoint_id: str, *, keeps_contexts: bool) -> None: ...

    async def diff(self, checkpoint_id: str, *, content: bool) -> tuple[TreeChange, ...]: ...

    async def checkpoints(self) -> tuple[CheckpointInfo, ...]: ...

    async def drop_checkpoint(self, checkpoint_id: str) -> None: ...

    def export_checkpoint(self, checkpoint_id: str) -> AsyncIterator[bytes]:
        """Yield a tar archive of the whole checkpoint."""
        ...

    async def import_checkpoint(self, name: str, chunks: AsyncIterable[bytes]) -> CheckpointInfo:
        """Make a checkpoint of an archive; the work dir does not change."""
        ...

    async def adopt(self, other: object) -> CheckpointInfo:
        """Replace the work dir by that of ``other``, the transport of another session."""
        ...

    def fork(self, checkpoint_id: str) -> Fork:
        """Return what opens a fork."""
        ...


def calls_of(transport: object) -> CheckpointCalls:
    """Return the calls of a transport.

    Raises:
        SandboxUsageError: the transport has none.

    """
    calls: CheckpointCalls | None = getattr(transport, "checkpoint_calls", None)
    if calls is None:
        raise SandboxUsageError(
            "this session has no checkpoints",
            code="checkpoint-unsupported",
            hint="open it with on_device.session() or remote.session()",
        )
    return calls


def check_name(name: object) -> str:
    """Return a valid name of a checkpoint."""
    if not isinstance(name, str) or len(name) > MAX_NAME or _CONTROL.search(name):
        raise SandboxUsageError(
            f"name must be text of at most {MAX_NAME} characters without control characters, "
            f"not {name!r:.80}",
            argument="name",
        )
    return name


def no_such_checkpoint(checkpoint_id: str) -> SandboxUsageError:
    """Return the error for a checkpoint that the session does not have."""
    return SandboxUsageError(
        f"the session has no checkpoint {checkpoint_id!r:.80}",
        argument="checkpoint",
        code="no-such-checkpoint",
        hint="it was dropped, or belongs to another session; await session.checkpoints() lists "
        "those of this one",
    )
