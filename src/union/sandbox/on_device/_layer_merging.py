"""Merge the layers of a session in the background, so that long chains stay fast.

A merged directory replaces the layers that it consists of when a work dir is mounted the next time.
It is an addition: the layers themselves stay, for the checkpoints and forks that need each of them.
It belongs to the topmost of them and is removed with that one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._linux.layer_merge import LayerMerge, TreeCost, cost_of
from union.sandbox._linux.tree_copy import NO_SPACE
from union.sandbox._session import threads
from union.sandbox.errors import SandboxError
from union.sandbox.on_device._layer_store import Layer, MergedLayer, hold, release
from union.sandbox.on_device._work_layers import marks_prefix

if TYPE_CHECKING:
    from union.sandbox.on_device._layer_store import LayerStore
    from union.sandbox.on_device._transport import LocalTransport
    from union.sandbox.on_device._work_state import WorkState

__all__ = ["LayerMerger"]

_log = logging.getLogger("union.sandbox")

MIN_LAYERS: Final = 8
"""Layers that are not merged yet before a merge begins."""
LIMIT: Final = TreeCost(entries=2000, size=8 * 1024 * 1024)
"""The most that one merge copies. A layer with more stays alone."""
_ROOM: Final = 10
"""A merge takes at most one part in this many of what is free on the disk."""
MAX_PARTS: Final = 32
"""Directories of one merge; each is open meanwhile."""
MAX_ATTEMPTS: Final = 10
"""How often a merge that a command interrupts begins again, until the next checkpoint."""
_PASSING: Final = NO_SPACE | {errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Failures that are not due to the layers."""


class _Run(NamedTuple):
    """Layers next to each other that are worth merging."""

    begin: int
    end: int
    """Indexes in the chain."""
    parts: tuple[Layer, ...]
    """The directories, some of them merged already."""
    cost: TreeCost


class LayerMerger:
    """Merges layers of one session, one merge at a time."""

    def __init__(self, state: WorkState, transport: LocalTransport) -> None:
        self._state = state
        self._transport = transport
        self._task: asyncio.Task[None] | None = None

    def consider(self) -> None:
        """Start a merge if the present layers are worth one."""
        if self._task is None and self._singles() >= MIN_LAYERS:
            self._task = asyncio.create_task(self._merge())
            self._task.add_done_callback(self._on_done)

    def stop(self) -> None:
        """End a merge; what it still does is among the removals of the session."""
        if self._task is not None:
            self._task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.warning("merging layers failed", exc_info=exc)

    def _lower(self) -> tuple[Layer, ...]:
        layers = self._state.layers
        return () if layers is None else layers.lower

    def _singles(self) -> int:
        return _single(self._lower(), self._state.store())

    def _check_idle(self) -> None:
        """Raise if commands of the session run, which go first. Called in threads."""
        if not self._transport.pool.sandboxes.is_open or self._transport.runner.running():
            raise InterruptedError(errno.EINTR, "the session is used")

    async def _merge(self) -> None:
        for _ in range(MAX_ATTEMPTS):
            await self._transport.runner.idle()
            if not self._transport.pool.sandboxes.is_open or self._singles() < MIN_LAYERS:
                return
            try:
                await self._attempt(self._lower())
            except InterruptedError:
                continue
            except (OSError, SandboxError):
                # The layers stay as they are, and are mounted one by one.
                _log.debug("layers were not merged", exc_info=True)
            return

    async def _attempt(self, lower: tuple[Layer, ...]) -> None:
        """Merge some of these layers, which are held meanwhile."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state.removals.add(ended)
        hold(lower)
        try:
            store = self._state.store()
            run = await threads.merging.run(self, _choose, lower, store)
            if run is not None:
                self._check_idle()
                await self._merge_run(lower, run, store)
        finally:
            released = self._state.release(lower)
            if released is not None:
                await threads.until_done(released)
            self._state.removals.discard(ended)
            ended.set_result(None)

    async def _merge_run(self, lower: tuple[Layer, ...], run: _Run, store: LayerStore) -> None:
        layers = lower[run.begin : run.end]
        below = await self._state.open(lower[run.end :])
        try:
            await threads.merging.run(self, self._build, layers, run, store, below)
        except OSError as exc:
            if exc.errno not in _PASSING:
                for layer in layers:
                    layer.is_single = True
            raise
        finally:
            os.close(below)

    def _build(self, layers: tuple[Layer, ...], run: _Run, store: LayerStore, below: int) -> None:
        """Make the merged directory, in a thread."""
        _check_room(store.path, run.cost)
        made = store.new(os.stat(run.parts[0].path))
        hold((made,))
        try:
            LayerMerge(
                [part.path for part in run.parts],
                made.path,
                below=below,
                marks=marks_prefix(),
                limit=LIMIT,
                pause=self._check_idle,
            ).run()
        except BaseException:
            release((made,))
            raise
        made.cost = run.cost
        layers[0].merged = MergedLayer(made, layers[1:])


def _single(lower: tuple[Layer, ...], store: LayerStore) -> int:
    """Return the number of layers that are neither merged nor excluded."""
    number = at = 0
    while at < len(lower):
        layer = lower[at]
        if layer.merged is None:
            number += layer.store is store and not (layer.is_single or layer.is_copy)
            at += 1
        else:
            at += layer.merged.count
    return number


def _choose(lower: tuple[Layer, ...], store: LayerStore) -> _Run | None:
    """Return the topmost layers next to each other that are worth merging.

    A directory that is merged already is merged again with at least as many layers above it. So the
    number of directories grows with the logarithm of the number of layers.
    """
    begin = at = single = 0
    parts: list[Layer] = []
    cost = TreeCost()
    while at < len(lower):
        layer = lower[at]
        part, count = (
            (layer, 1) if layer.merged is None else (layer.merged.layer, layer.merged.count)
        )
        added = _cost(part) if layer.store is store and not layer.is_copy else None
        fits = added is not None and (cost + added).fits(LIMIT) and len(parts) < MAX_PARTS
        if added is None or not fits or count > max(at - begin, 1):
            if single >= MIN_LAYERS:
                break
            parts, cost, single, begin = [], TreeCost(), 0, at
            if added is None or count > 1:
                begin, at = at + count, at + count
                continue
        parts.append(part)
        cost += added
        single += count == 1
        at += count
    return _Run(begin, at, tuple(parts), cost) if single >= MIN_LAYERS else None


def _cost(layer: Layer) -> TreeCost | None:
    """Return the cost of merging a layer; None if it stays alone."""
    if layer.is_single:
        return None
    if layer.cost is None:
        try:
            cost = cost_of(layer.path, LIMIT)
        except OSError:
            # Sandboxed code has made a directory that its owner cannot read.
            _log.debug("a layer cannot be counted, and is not merged", exc_info=True)
            layer.is_single = True
            return None
        layer.cost = cost
        layer.is_single = not cost.fits(LIMIT)
    return None if layer.is_single else layer.cost


def _check_room(place: str, cost: TreeCost) -> None:
    found = os.statvfs(place)
    # A file system without a fixed number of inodes reports none.
    has_inodes = not found.f_files or found.f_favail >= cost.entries * _ROOM
    if not has_inodes or found.f_bavail * found.f_frsize < cost.size * _ROOM:
        raise OSError(errno.ENOSPC, "the disk has little room for merged layers", place)
