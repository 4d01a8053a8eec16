"""Checkpoint: the handle of one state of a session's work dir."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from union.sandbox._checkpoints.values import calls_of
from union.sandbox._session.lifecycle import SingleUseLifecycle
from union.sandbox._session.own_loop import carry, foreign_loop
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Coroutine

    from union.sandbox._checkpoints.values import CheckpointInfo, LayerKind
    from union.sandbox._session.session import Session
    from union.sandbox._session.transport import Transport

__all__ = ["Checkpoint"]

MAX_FORKS: Final = 256


class Checkpoint:
    """A state of a work dir: files, links, directories, their modes, and the venv.

    ``Session.checkpoint()`` returns one. It belongs to its session and ends with it; forks that
    were opened from it go on.
    """

    def __init__(self, session: Session, info: CheckpointInfo) -> None:
        self._session = session
        self._info = info

    @property
    def id(self) -> str:
        """Unique among the checkpoints of the session."""
        return self._info.id

    @property
    def name(self) -> str:
        """The name given to ``checkpoint()``; empty for none."""
        return self._info.name

    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        return self._info.created

    @property
    def kind(self) -> LayerKind:
        """What it is made of: ``overlay``, ``overlay-tmpfs`` or ``copy``."""
        return self._info.kind

    @property
    def took_s(self) -> float:
        """Seconds that ``checkpoint()`` took."""
        return self._info.took_s

    @property
    def size_bytes(self) -> int | None:
        """Bytes on disk since the checkpoint before it; counted by ``Session.checkpoints()``."""
        return self._info.size_bytes

    def fork(self) -> Session:
        """Return a session of its own that begins with this state; ``async with`` opens it.

        It has the settings of this session and a private work dir, seen under the same path.
        """
        session = self._session
        transport = session._live_transport()  # noqa: SLF001 - one package
        fork = calls_of(transport).fork(self.id)
        spec = session._spec  # noqa: SLF001
        make = cast("Callable[[], Transport]", fork.make)
        return type(session)(spec, SingleUseLifecycle(spec, make), fork.session_id)

    async def fork_many(self, count: int) -> list[Session]:
        """Open several forks at once and return them; the caller closes each.

        If one cannot be opened, the others are closed again.

        Args:
            count: number of forks, from 1 to 256.

        """
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_FORKS:
            raise SandboxUsageError(
                f"count must be a number from 1 to {MAX_FORKS}, not {count!r:.80}", argument="count"
            )
        loop = foreign_loop(self._session)
        if loop is not None:
            return await carry(loop, lambda: self.fork_many(count))
        forks = [self.fork() for _ in range(count)]
        opened = await asyncio.gather(*(one.open() for one in forks), return_exceptions=True)
        failed = [error for error in opened if isinstance(error, BaseException)]
        if failed:
            await asyncio.gather(*(one.close() for one in forks), return_exceptions=True)
            raise failed[0]
        return forks

    async def drop(self) -> None:
        """Remove the checkpoint. Forks of it are not affected."""
        await self._call(self._drop)

    async def _drop(self, transport: object) -> None:
        await calls_of(transport).drop_checkpoint(self.id)
        await self._session._forget_contexts(self.id)  # noqa: SLF001 - one package

    async def export(self, path: str | os.PathLike[str]) -> int:
        """Write the whole state as a tar archive and return its size in bytes.

        ``Session.import_checkpoint()`` reads it again. Special files are left out.

        Args:
            path: a file of the host; an existing one is replaced.

        """
        from union.sandbox._session.archives import write_chunks

        def chunks(transport: object) -> Coroutine[Any, Any, int]:
            stream: AsyncIterator[bytes] = calls_of(transport).export_checkpoint(self.id)
            return write_chunks(path, stream)

        return cast("int", await self._call(chunks))

    async def _call(self, call: Callable[[object], Coroutine[Any, Any, Any]]) -> Any:
        session = self._session
        loop = foreign_loop(session)
        if loop is not None:
            return await carry(loop, lambda: self._call(call))
        return await call(session._live_transport())  # noqa: SLF001 - one package

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id} name={self.name!r} kind={self.kind}>"
