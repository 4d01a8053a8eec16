"""The checkpoints of one session on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._checkpoints.values import (
    CheckpointInfo,
    CheckpointLimits,
    Fork,
    TreeChange,
    no_such_checkpoint,
)
from union.sandbox._core.files import VENV_DIR
from union.sandbox._linux.tree_copy import size_of
from union.sandbox._linux.tree_diff import TreeComparison
from union.sandbox._session import threads
from union.sandbox.errors import SandboxUsageError
from union.sandbox.on_device._layer_store import Layer, hold
from union.sandbox.on_device._work_state import WorkState
from union.sandbox.on_device._workdir import report_full_disk

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterable, AsyncIterator

    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._transport import LocalTransport

__all__ = ["LocalCheckpoints", "Origin"]

_SITE: Final = r"lib/python[0-9.]+(/site-packages(/__pycache__)?)?"
_HOOK: Final = r"lib/python[0-9.]+/site-packages/(__pycache__/)?(_union_sandbox|pip)\.[^/]+"
_TOOLS: Final = r"bin|bin/(python[0-9.]*|uv|pip3?)"
_OF_VENV: Final = re.compile(
    rf"{re.escape(VENV_DIR)}(/(pyvenv\.cfg|\.gitignore|lib64|lib|{_TOOLS}|{_SITE}|{_HOOK}))?"
)
"""Files of the venv that this package writes itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a forked session begins with."""

    info: CheckpointInfo
    layers: tuple[Layer, ...]


class LocalCheckpoints:
    """Take checkpoints of the work dir of one session, and return to them."""

    def __init__(self, transport: LocalTransport, *, origin: Origin | None = None) -> None:
        self._transport = transport
        self._origin = origin
        self._kept: dict[str, Origin] = {}
        self._state = WorkState(transport, on_remove=self._remove_all)
        self.limits = CheckpointLimits()
        """Limits on the checkpoints that the session keeps; a server sets its own."""

    # The calls.

    async def checkpoint(self, name: str) -> CheckpointInfo:
        """Keep the present state."""
        begun = time.perf_counter()
        self._check_count()
        async with self._state.idle(ends_runs=False, may_run=True) as running:
            layers = await self._frozen(self._state, running)
        return self._keep(name, layers, took_s=time.perf_counter() - begun)

    async def _frozen(self, state: WorkState, running: list[LocalRun]) -> tuple[Layer, ...]:
        """Make the present state of this session, or of another one, a checkpoint's."""
        if self.limits.size is not None:
            await self._check_size(await state.present_size(whole=bool(running)))
        return await (state.copy_running(running) if running else state.freeze())

    async def rollback(self, checkpoint_id: str, *, keeps_contexts: bool) -> None:
        """Return to a checkpoint; running commands are ended, contexts unless they are kept."""
        layers = self._find(checkpoint_id).layers
        if keeps_contexts:
            async with self._state.idle(ends_runs=True, keeps_contexts=True) as running:
                if running and await self._state.restore_running(layers, running):
                    return
        async with self._state.idle(ends_runs=True):
            await self._state.restore(layers)

    async def diff(self, checkpoint_id: str, *, content: bool) -> tuple[TreeChange, ...]:
        """Compare a checkpoint with the present state."""
        old = self._find(checkpoint_id).layers
        hold(old)
        try:
            view = await self._state.open(old)
            try:
                tree = self._transport.work.tree
                with contextlib.ExitStack() as opened:
                    # Without a pause in between: a checkpoint would add a layer.
                    touched = None
                    if self._state.layers is not None:
                        new = self._state.layers.present
                        touched = [layer.path for layer in _not_common(old, new)]
                        hold(new)
                        opened.callback(self._state.release, new)
                    now = tree.dup_root()
                    opened.callback(os.close, now)
                    comparison = TreeComparison(
                        view, now, layers=touched, content=content, skip=_is_of_venv
                    )
                    return await threads.files.run(tree, comparison.run)
            finally:
                os.close(view)
        finally:
            self._state.release(old)

    async def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return all of them, oldest first, with their sizes."""
        return tuple(
            [
                dataclasses.replace(kept.info, size_bytes=await _size(kept.layers[0]))
                for kept in tuple(self._kept.values())
            ]
        )

    async def drop_checkpoint(self, checkpoint_id: str) -> None:
        """Forget a checkpoint and remove what only it needs."""
        kept = self._kept.pop(checkpoint_id, None)
        if kept is None:
            raise no_such_checkpoint(checkpoint_id)
        self._state.release(kept.layers)

    def fork(self, checkpoint_id: str) -> Fork:
        """Return what opens a fork: a function that makes its transport."""
        self._find(checkpoint_id)
        return Fork(lambda: self._transport.forked(self.origin(checkpoint_id)))

    def origin(self, checkpoint_id: str) -> Origin:
        """Return the state that a fork of a checkpoint begins with."""
        return self._find(checkpoint_id)

    async def adopt(self, other: object) -> CheckpointInfo:
        """Replace the present state by that of another session of this process."""
        theirs = getattr(other, "checkpoint_calls", None)
        if not isinstance(theirs, LocalCheckpoints) or theirs is self:
            raise SandboxUsageError(
                "adopt() needs another session of this process",
                argument="other",
                hint="export() a checkpoint of the other session and import_checkpoint() it here",
            )
        begun = time.perf_counter()
        self._check_count()
        state = theirs._state  # noqa: SLF001 - of the same class
        async with state.idle(ends_runs=False, may_run=True) as running:
            layers = await self._frozen(state, running)
            hold(layers)
        try:
            async with self._state.idle(ends_runs=True):
                await self._state.restore(layers)
            return self._keep("adopted", layers, took_s=time.perf_counter() - begun)
        finally:
            state.release(layers)

    def export_checkpoint(self, checkpoint_id: str) -> AsyncIterator[bytes]:
        """Yield a tar archive of a checkpoint."""
        return self._export(self._find(checkpoint_id).layers)

    async def _export(self, layers: tuple[Layer, ...]) -> AsyncIterator[bytes]:
        from union.sandbox.on_device._checkpoint_archives import exported

        hold(layers)
        try:
            view = await self._state.open(layers)
            try:
                place = self._state.store().path
                with report_full_disk(os.path.dirname(place)):
                    async for chunk in exported(view, place):
                        yield chunk
            finally:
                os.close(view)
        finally:
            self._state.release(layers)

    async def import_checkpoint(self, name: str, chunks: AsyncIterable[bytes]) -> CheckpointInfo:
        """Make a checkpoint of an archive."""
        from union.sandbox.on_device._checkpoint_archives import imported

        begun = time.perf_counter()
        self._check_count()
        room = None
        if self.limits.size is not None:
            room = self.limits.size - await self._size_kept()
        state = self._state
        if state.kind == "plain":
            async with state.idle(ends_runs=False):
                if state.kind == "plain":
                    await state.decide()
        store = state.store()
        layer = state.new_copy()
        hold((layer,))
        try:
            with report_full_disk(os.path.dirname(store.path)):
                await imported(chunks, layer.path, store.path, owner=store.owner, max_bytes=room)
            self._check_count()  # others may have been taken meanwhile
            if self.limits.size is not None:
                await self._check_size(await _size(layer))
            return self._keep(name, (layer,), took_s=time.perf_counter() - begun)
        finally:
            state.release((layer,))

    # Opening.

    async def limit_disk(self, size: int) -> None:
        """Limit what the session keeps in its work dir, before its first command."""
        await self._state.limit_disk(size)

    def hold_origin(self) -> None:
        """Keep the checkpoint that this session is forked from, whatever becomes of its session."""
        if self._origin is not None:
            hold(self._origin.layers)

    async def begin(self) -> None:
        """Show the checkpoint that this session was forked from, in its new work dir."""
        if self._origin is None:
            return
        async with self._state.idle(ends_runs=False):
            await self._state.restore(self._origin.layers)

    # Parts.

    def _find(self, checkpoint_id: str) -> Origin:
        found = self._kept.get(checkpoint_id)
        if found is None and self._origin is not None and self._origin.info.id == checkpoint_id:
            found = self._origin
        if found is None:
            raise no_such_checkpoint(checkpoint_id)
        return found

    def _keep(self, name: str, layers: tuple[Layer, ...], *, took_s: float) -> CheckpointInfo:
        info = CheckpointInfo(
            id=secrets.token_hex(8),
            name=name,
            created=time.time(),
            kind="copy" if layers[0].is_copy else self._state.kind,
            took_s=took_s,
        )
        hold(layers)
        self._kept[info.id] = Origin(info, layers)
        return info

    def _check_count(self) -> None:
        if len(self._kept) >= self.limits.number:
            raise SandboxUsageError(
                f"the session has {len(self._kept)} checkpoints; the limit is {self.limits.number}",
                code="checkpoint-limit",
                hint="drop() those that are not needed",
            )

    async def _check_size(self, added: int) -> None:
        limit = self.limits.size
        if limit is not None and (total := added + await self._size_kept()) > limit:
            raise SandboxUsageError(
                f"the checkpoints of the session would take {total} bytes; the limit is {limit}",
                code="checkpoint-limit",
                hint="drop() those that are not needed",
            )

    async def _size_kept(self) -> int:
        """Return the bytes on disk of all layers that checkpoints of this session hold."""
        layers = {layer for kept in tuple(self._kept.values()) for layer in kept.layers}
        return sum([await _size(layer) for layer in layers])

    def end(self) -> tuple[asyncio.Future[None], ...]:
        """Return the removals that have not ended; the work dir removes the rest."""
        self._state.merger.stop()
        if self._transport.is_known:
            # A fork that did not open has no layers of its own, but holds those of its origin.
            self._transport.work.on_remove = self._remove_all
        else:
            self._remove_all()
        return tuple(self._state.removals)

    def _remove_all(self) -> None:
        """Release everything at the end of the session; blocks."""
        held = [layer for kept in self._kept.values() for layer in kept.layers]
        self._kept.clear()
        if self._origin is not None:
            held += self._origin.layers
            self._origin = None
        self._state.remove(held)


def _is_of_venv(path: str) -> bool:
    return _OF_VENV.fullmatch(path) is not None


async def _size(layer: Layer) -> int:
    """Return the bytes of a layer that is not written any more."""
    if layer.size is None:
        layer.size = await threads.files.run(layer, size_of, layer.path)
    return layer.size


def _not_common(old: tuple[Layer, ...], new: tuple[Layer, ...]) -> list[Layer]:
    """Return the layers that only one of the two has above those they share."""
    common = 0
    for one, other in zip(reversed(old), reversed(new), strict=False):
        if one is not other:
            break
        common += 1
    return [*old[: len(old) - common], *new[: len(new) - common]]
