"""The checkpoints of one session on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._checkpoints.values import CheckpointInfo, TreeChange, no_such_checkpoint
from union.sandbox._core.files import VENV_DIR
from union.sandbox._linux.open_files import open_for_writing
from union.sandbox._linux.tree_copy import copy_tree, restore_tree, size_of
from union.sandbox._linux.tree_diff import TreeComparison
from union.sandbox._session import threads
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxBusyError, SandboxUsageError
from union.sandbox.on_device._layer_store import Layer, LayerStore, hold, release
from union.sandbox.on_device._network import shape_of
from union.sandbox.on_device._work_layers import (
    MAX_LAYERS,
    HeldMount,
    LayersRefusedError,
    WorkLayers,
    open_view,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable

    from union.sandbox._checkpoints.values import LayerKind
    from union.sandbox._linux.channel import Channel
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._transport import LocalTransport

__all__ = ["LocalCheckpoints", "Origin"]

_log = logging.getLogger("union.sandbox")
MAX_CHECKPOINTS: Final = 1000
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
    """Take checkpoints of the work dir of one session, and return to them.

    A private work dir with a private root becomes layers at the first checkpoint; every other one
    is copied.
    """

    def __init__(self, transport: LocalTransport, *, origin: Origin | None = None) -> None:
        self._transport = transport
        self._origin = origin
        self._kept: dict[str, Origin] = {}
        self._layers: WorkLayers | None = None
        self._store: LayerStore | None = None
        self._kind: LayerKind = "plain"
        self._lock = asyncio.Lock()
        self._removals: set[asyncio.Future[None]] = set()
        self._plain: tuple[Layer, ...] = ()
        """The session's own directory, below the mount of its layers. It is held until the end: the
        kernel unmounts everything from a directory that is removed."""
        self._disk: HeldMount | None = None
        """The tmpfs that limits the work dir."""

    # The calls.

    async def checkpoint(self, name: str) -> CheckpointInfo:
        """Keep the present state."""
        begun = time.perf_counter()
        if len(self._kept) >= MAX_CHECKPOINTS:
            raise SandboxUsageError(
                f"the session has {MAX_CHECKPOINTS} checkpoints, which is the limit",
                code="checkpoint-limit",
                hint="drop() those that are not needed",
            )
        async with self._idle(ends_runs=False):
            layers = await self._freeze()
        return self._keep(name, layers, took_s=time.perf_counter() - begun)

    async def rollback(self, checkpoint_id: str) -> None:
        """Return to a checkpoint; running commands are ended."""
        layers = self._find(checkpoint_id).layers
        async with self._idle(ends_runs=True):
            await self._restore(layers)

    async def diff(self, checkpoint_id: str, *, content: bool) -> tuple[TreeChange, ...]:
        """Compare a checkpoint with the present state."""
        old = self._find(checkpoint_id).layers
        hold(old)
        try:
            view = await self._open(old)
            try:
                tree = self._transport.work.tree
                with contextlib.ExitStack() as opened:
                    # Without a pause in between: a checkpoint would add a layer.
                    touched = None
                    if self._layers is not None:
                        new = self._layers.present
                        touched = [layer.path for layer in _not_common(old, new)]
                        hold(new)
                        opened.callback(self._release, new)
                    now = tree.dup_root()
                    opened.callback(os.close, now)
                    comparison = TreeComparison(
                        view, now, layers=touched, content=content, skip=_is_of_venv
                    )
                    return await threads.files.run(tree, comparison.run)
            finally:
                os.close(view)
        finally:
            self._release(old)

    async def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return all of them, oldest first, with their sizes."""
        found = []
        for kept in tuple(self._kept.values()):
            layer = kept.layers[0]
            if layer.size is None:
                layer.size = await threads.files.run(layer, size_of, layer.path)
            found.append(_with_size(kept.info, layer.size))
        return tuple(found)

    async def drop_checkpoint(self, checkpoint_id: str) -> None:
        """Forget a checkpoint and remove what only it needs."""
        kept = self._kept.pop(checkpoint_id, None)
        if kept is None:
            raise no_such_checkpoint(checkpoint_id)
        self._release(kept.layers)

    def fork(self, checkpoint_id: str) -> Callable[[], LocalTransport]:
        """Return a function that makes the transport of a fork."""
        self._find(checkpoint_id)
        return lambda: self._transport.forked(self._find(checkpoint_id))

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
        taken = await theirs.checkpoint("")
        try:
            layers = theirs._find(taken.id).layers  # noqa: SLF001 - of the same class
            async with self._idle(ends_runs=True):
                await self._restore(layers)
            return self._keep("adopted", layers, took_s=time.perf_counter() - begun)
        finally:
            await theirs.drop_checkpoint(taken.id)

    def export_checkpoint(self, checkpoint_id: str) -> AsyncIterator[bytes]:
        """Yield a tar archive of a checkpoint."""
        return self._export(self._find(checkpoint_id).layers)

    async def _export(self, layers: tuple[Layer, ...]) -> AsyncIterator[bytes]:
        from union.sandbox.on_device._checkpoint_archives import exported

        hold(layers)
        try:
            view = await self._open(layers)
            try:
                async for chunk in exported(view, self._own_store().path):
                    yield chunk
            finally:
                os.close(view)
        finally:
            self._release(layers)

    async def import_checkpoint(self, name: str, chunks: AsyncIterable[bytes]) -> CheckpointInfo:
        """Make a checkpoint of an archive."""
        from union.sandbox.on_device._checkpoint_archives import imported

        begun = time.perf_counter()
        if self._kind == "plain":
            async with self._idle(ends_runs=False):
                await self._decide()
        store = self._own_store()
        layer = store.new(self._like())
        layer.is_copy = True
        hold((layer,))
        try:
            await imported(chunks, layer.path, store.path, owner=store.owner)
            return self._keep(name, (layer,), took_s=time.perf_counter() - begun)
        finally:
            self._release((layer,))

    # Forks.

    async def limit_disk(self, size: int) -> None:
        """Limit what the session keeps in its work dir, before its first command."""
        from union.sandbox.on_device._disk_limit import limit_disk, unavailable

        transport = self._transport
        posture, channel = await self._quiesce()
        if not self._can_layer(posture):
            raise unavailable(
                transport.spec.backend, "the work dir is pinned, or is no mount of its own"
            )
        self._disk = await limit_disk(transport.work, posture, channel, size)
        transport.postures.layers = self._disk
        transport.work.on_remove = self._remove_all
        self._after_mount()

    def hold_origin(self) -> None:
        """Keep the checkpoint that this session is forked from, whatever becomes of its session."""
        if self._origin is not None:
            hold(self._origin.layers)

    async def begin(self) -> None:
        """Show the checkpoint that this session was forked from, in its new work dir."""
        if self._origin is None:
            return
        self._transport.work.on_remove = self._remove_all
        async with self._idle(ends_runs=False):
            await self._restore(self._origin.layers)

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
            kind=self._kind,
            took_s=took_s,
        )
        hold(layers)
        self._kept[info.id] = Origin(info, layers)
        return info

    @contextlib.asynccontextmanager
    async def _idle(self, *, ends_runs: bool) -> AsyncIterator[None]:
        """Hold back commands and file calls while nothing of the session runs."""
        transport = self._transport
        if transport.pool.is_machine:
            raise SandboxUsageError(
                "a session with persist='machine' has no checkpoints: its processes and scratch "
                "files are not in the work dir",
                code="checkpoint-unsupported",
                hint="open the session with persist='workdir'",
            )
        runner = transport.runner
        async with self._lock, runner.gate.closed(), transport.changes.closed():
            if ends_runs:
                runner.end_all()
            elif running := runner.running():
                raise await self._busy(len(running))
            await runner.idle()
            yield

    async def _busy(self, count: int) -> SandboxBusyError:
        work = self._transport.work
        files = await threads.files.run(work.tree, open_for_writing, work.tree, work.path)
        return SandboxBusyError(count, files)

    async def _quiesce(self) -> tuple[Posture, Channel]:
        """End the sandboxes that wait for commands; return the posture and the channel.

        A waiting Python executes code of the venv, which may still write.
        """
        transport = self._transport
        pool, postures = transport.pool, transport.postures
        shape = shape_of(transport.spec.network)
        posture = postures.get(shape)
        if not pool.is_bare and not postures.is_ready(posture):
            posture = await postures.ready(shape)
        pool.release()
        channel = pool.channel()
        await channel.drain()
        return posture, channel

    def _can_layer(self, posture: Posture) -> bool:
        work = self._transport.work
        pool = self._transport.pool
        if not IS_LINUX or pool.uses_host_root or pool.is_machine or not work.is_private:
            return False
        if self._disk is not None:
            return False  # its tmpfs cannot be a layer of directories of the host
        is_covered = any(item.path.startswith(work.path + "/") for item in posture.view.added)
        return posture.plan.shared is not None and not is_covered

    async def _decide(self) -> None:
        """Make the plain directory the lowest layer, or find out that it has to be copied."""
        self._own_store()
        posture, channel = await self._quiesce()
        if not self._can_layer(posture):
            self._set_kind("copy")
            return
        base = self._base()
        layers = WorkLayers(self._transport.work, self._own_store(), posture.root)
        try:
            await layers.mount((base,), posture.root, channel)
        except LayersRefusedError as exc:
            _log.debug("layers are refused, work dirs are copied: %s (step %d)", exc, exc.place)
            self._set_kind("copy")
            return
        self._use_layers(layers)

    def _base(self) -> Layer:
        """Return the private directory as the lowest layer."""
        work = self._transport.work
        owned = work.owned
        if owned is None:
            raise RuntimeError("a pinned work dir is no layer")
        return Layer(LayerStore(owned, owner=work.owner, is_layer=True), work.source)

    def _use_layers(self, layers: WorkLayers) -> None:
        transport = self._transport
        self._layers = layers
        self._plain = layers.lower
        hold(self._plain)
        transport.work.keep_as_layer()
        transport.postures.layers = layers
        self._set_kind("overlay")
        self._after_mount()

    def _set_kind(self, kind: LayerKind) -> None:
        self._kind = kind
        self._transport.postures.set_layers(kind)
        if self._store is not None:
            self._transport.work.on_remove = self._remove_all

    def _own_store(self) -> LayerStore:
        if self._store is None:
            work = self._transport.work
            place = os.path.dirname(work.source) if work.is_private else None
            owner = work.owner
            if work.is_private and self._transport.pool.uses_host_root is False:
                identity = self._transport.postures.get(
                    shape_of(self._transport.spec.network)
                ).identity
                owner = (identity.host_uid, identity.host_gid)
            self._store = LayerStore.make(place, owner=owner)
            work.on_remove = self._remove_all
        return self._store

    def _like(self) -> os.stat_result:
        with self._transport.work.tree.borrow_root(".") as top:
            return os.fstat(top)

    async def _freeze(self) -> tuple[Layer, ...]:
        """Make the present state one that is not written any more; return its layers."""
        if self._kind == "plain":
            await self._decide()
            if self._layers is not None:
                return self._layers.lower
        if self._layers is None:
            await self._quiesce()
            return (await self._copied(),)
        frozen = self._layers.present
        if len(frozen) > MAX_LAYERS - 1:
            await self._quiesce()
            frozen = (await self._copied(),)
        await self._mount(frozen)
        return frozen

    async def _mount(self, lower: tuple[Layer, ...]) -> None:
        layers = self._layers
        if layers is None:
            raise RuntimeError("the session has no layers")
        posture, channel = await self._quiesce()
        try:
            last = await layers.mount(lower, posture.root, channel)
        except OSError as exc:
            raise self._transport.pool.spawn_failed("the layers were not mounted", exc) from exc
        self._release(last)
        self._after_mount()

    def _after_mount(self) -> None:
        """Make commands use the new mount, and have a sandbox ready for the next one."""
        transport = self._transport
        transport.runner.forget_tree()
        posture = transport.postures.get(shape_of(transport.spec.network))
        try:
            transport.pool.keep_first(posture)
        except OSError:
            _log.debug("preparing a spare sandbox failed", exc_info=True)

    async def _restore(self, layers: tuple[Layer, ...]) -> None:
        """Make the present state that of these layers."""
        if self._kind == "plain":
            await self._decide_for(layers)
            if self._layers is not None:
                return
        if self._layers is not None:
            await self._mount(layers)
            return
        await self._quiesce()
        work = self._transport.work
        source = await self._open(layers)
        try:
            with work.tree.borrow_root(".") as top:
                owner = work.tree.owner if work.is_private else None
                restore = functools.partial(
                    restore_tree, source, top, owner=owner, kept=work.tree.kept
                )
                await threads.files.run(work.tree, restore)
        finally:
            os.close(source)
        self._transport.runner.forget_tree()

    async def _decide_for(self, layers: tuple[Layer, ...]) -> None:
        """Like ``_decide``, with these layers in place of the plain directory."""
        self._own_store()
        posture, channel = await self._quiesce()
        if not self._can_layer(posture):
            self._set_kind("copy")
            return
        made = WorkLayers(self._transport.work, self._own_store(), posture.root)
        try:
            await made.mount(layers, posture.root, channel)
        except LayersRefusedError as exc:
            _log.debug("layers are refused, work dirs are copied: %s (step %d)", exc, exc.place)
            self._set_kind("copy")
            return
        self._layers = made
        self._transport.postures.layers = made
        self._set_kind("overlay")
        self._after_mount()

    async def _copied(self) -> Layer:
        """Copy the present state into a new directory."""
        work = self._transport.work
        layer = self._own_store().new(self._like())
        layer.is_copy = True
        try:
            with contextlib.ExitStack() as opened:
                source = work.tree.dup_root()
                opened.callback(os.close, source)
                target = os.open(layer.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, target)
                await threads.files.run(work.tree, copy_tree, source, target)
        except BaseException:
            hold((layer,))
            self._release((layer,))
            raise
        return layer

    async def _open(self, layers: tuple[Layer, ...]) -> int:
        """Return a descriptor of a tree with the content of these layers."""
        transport = self._transport
        if len(layers) == 1 and layers[0].is_copy:
            return os.open(layers[0].path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        posture = transport.postures.get(shape_of(transport.spec.network))
        channel = transport.pool.channel()
        return await open_view(layers, self._own_store(), channel, root=posture.root)

    def _release(self, layers: Iterable[Layer]) -> None:
        """Release layers in a thread: removing many files takes longer than anything else."""
        try:
            done = threads.removal.start(self, functools.partial(release, tuple(layers)))
        except threads.PoolFullError:
            release(layers)
            return
        self._removals.add(done)
        done.add_done_callback(self._on_removed)

    def _on_removed(self, done: asyncio.Future[None]) -> None:
        self._removals.discard(done)
        if not done.cancelled() and done.exception() is not None:
            _log.warning("a layer was not removed", exc_info=done.exception())

    def end(self) -> tuple[asyncio.Future[None], ...]:
        """Return the removals that have not ended; the work dir removes the rest."""
        if not self._transport.is_known:  # there is none
            self._remove_all()
        return tuple(self._removals)

    def _remove_all(self) -> None:
        """Release everything at the end of the session; blocks."""
        held = [layer for kept in self._kept.values() for layer in kept.layers]
        held += self._plain
        self._kept.clear()
        if self._origin is not None:
            held += self._origin.layers
            self._origin = None
        if self._disk is not None:
            self._disk.close()
        if self._layers is not None:
            held += self._layers.present
            self._layers.close()
        release(held, close=self._store)


def _is_of_venv(path: str) -> bool:
    return _OF_VENV.fullmatch(path) is not None


def _with_size(info: CheckpointInfo, size: int) -> CheckpointInfo:
    return dataclasses.replace(info, size_bytes=size)


def _not_common(old: tuple[Layer, ...], new: tuple[Layer, ...]) -> list[Layer]:
    """Return the layers that only one of the two has above those they share."""
    common = 0
    for one, other in zip(reversed(old), reversed(new), strict=False):
        if one is not other:
            break
        common += 1
    return [*old[: len(old) - common], *new[: len(new) - common]]
