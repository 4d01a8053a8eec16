"""The state of one session's work dir: a plain directory, layers, or a directory that is copied.

``freeze()`` makes the present state one that is not written any more, ``restore()`` returns to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from typing import TYPE_CHECKING

from union.sandbox._linux.stopped import NotStoppedError
from union.sandbox._linux.tree_copy import copy_tree, restore_tree, size_of
from union.sandbox._session import threads
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxUsageError
from union.sandbox.on_device._layer_merging import LayerMerger
from union.sandbox.on_device._layer_store import Layer, LayerStore, hold, mounted, release
from union.sandbox.on_device._network import shape_of
from union.sandbox.on_device._stopping import busy, processes_of
from union.sandbox.on_device._work_layers import (
    MAX_LAYERS,
    HeldMount,
    LayersRefusedError,
    WorkLayers,
    open_view,
)
from union.sandbox.on_device._workdir import report_full_disk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from union.sandbox._checkpoints.values import LayerKind
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._transport import LocalTransport

__all__ = ["WorkState"]

_log = logging.getLogger("union.sandbox")


class WorkState:
    """The work dir of an open session, as layers or copies.

    A private work dir with a private root becomes layers at the first checkpoint; every other one
    is copied.
    """

    def __init__(self, transport: LocalTransport, *, on_remove: Callable[[], None]) -> None:
        self._transport = transport
        self._on_remove = on_remove
        self.layers: WorkLayers | None = None
        self._store: LayerStore | None = None
        self.kind: LayerKind = "plain"
        self._lock = asyncio.Lock()
        self.removals: set[asyncio.Future[None]] = set()
        """Removals and merges of layers that have not ended."""
        self.merger = LayerMerger(self, transport)
        self._plain: tuple[Layer, ...] = ()
        """The session's own directory, below the mount of its layers. It is held until the end: the
        kernel unmounts everything from a directory that is removed."""
        self._disk: HeldMount | None = None
        """The tmpfs that limits the work dir."""

    # Holding back commands.

    @contextlib.asynccontextmanager
    async def idle(
        self, *, ends_runs: bool, may_run: bool = False, keeps_contexts: bool = False
    ) -> AsyncIterator[list[LocalRun]]:
        """Hold back commands and file calls while nothing of the session runs.

        Args:
            ends_runs: end the commands and contexts that run.
            may_run: yield those that run, which may go on; otherwise they are an error.
            keeps_contexts: with ``ends_runs``, yield the contexts, which go on.

        """
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
                runner.end_all(keeps_contexts=keeps_contexts)
                await runner.idle(keeps_contexts=keeps_contexts)
                yield runner.running()
                return
            elif running := runner.running():
                if not may_run or transport.pool.uses_host_root or transport.pool.is_bare:
                    raise await busy(transport, len(running))
                yield running
                return
            await runner.idle()
            yield []

    async def _quiesce(self) -> tuple[Posture, Channel]:
        """End the sandboxes that wait for commands; return the posture and the channel.

        A waiting Python executes code of the venv, which may still write.
        """
        transport = self._transport
        pool, postures = transport.pool, transport.postures
        shape = shape_of(transport.spec.network)
        posture = postures.usable(shape) or await postures.ready(shape)
        pool.release()
        channel = pool.channel()
        await channel.drain()
        return posture, channel

    # Layers or copies.

    def _can_layer(self, posture: Posture) -> bool:
        work = self._transport.work
        pool = self._transport.pool
        if not IS_LINUX or pool.uses_host_root or pool.is_machine or not work.is_private:
            return False
        if self._disk is not None:
            return False  # its tmpfs cannot be a layer of directories of the host
        is_covered = any(item.path.startswith(work.path + "/") for item in posture.view.added)
        return posture.plan.shared is not None and not is_covered

    async def decide(self) -> None:
        """Make the plain directory the lowest layer, or find out that it has to be copied."""
        if await self._try_layers(self._base):
            layers = self.layers
            if layers is None:
                raise RuntimeError("the layers were not mounted")
            self._plain = layers.lower
            hold(self._plain)
            self._transport.work.keep_as_layer()

    async def _try_layers(self, lower: Callable[[], tuple[Layer, ...]]) -> bool:
        """Mount the first layers; return False if the work dir has to be copied."""
        store = self.store()
        posture, channel = await self._quiesce()
        if not self._can_layer(posture):
            self._set_kind("copy")
            return False
        layers = WorkLayers(self._transport.work, store, posture.root)
        try:
            await layers.mount(lower(), posture.root, channel)
        except LayersRefusedError as exc:
            _log.debug("layers are refused, work dirs are copied: %s (step %d)", exc, exc.place)
            self._set_kind("copy")
            return False
        self.layers = layers
        self._transport.postures.layers = layers
        self._set_kind("overlay")
        self._after_mount()
        return True

    def _base(self) -> tuple[Layer, ...]:
        """Return the private directory as the lowest layer."""
        work = self._transport.work
        owned = work.owned
        if owned is None:
            raise RuntimeError("a pinned work dir is no layer")
        return (Layer(LayerStore(owned, owner=work.owner, is_layer=True), work.source),)

    def _set_kind(self, kind: LayerKind) -> None:
        self.kind = kind
        self._transport.postures.set_layers(kind)
        if self._store is not None:
            self._transport.work.on_remove = self._on_remove

    def store(self) -> LayerStore:
        """Return the store of the session's layers, made at its first use."""
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
            work.on_remove = self._on_remove
        return self._store

    def new_copy(self) -> Layer:
        """Create an empty layer that will have a whole state."""
        with self._transport.work.tree.borrow_root(".") as top:
            layer = self.store().new(os.fstat(top))
        layer.is_copy = True
        return layer

    # Keeping a state and returning to it.

    async def present_size(self, *, whole: bool = False) -> int:
        """Return the bytes on disk that the next checkpoint adds to those before it.

        Args:
            whole: count everything, because it will be copied.

        Raises:
            SandboxUsageError: sandboxed code has made a directory that cannot be counted.

        """
        work = self._transport.work
        upper = None if self.layers is None or whole else self.layers.upper
        count = functools.partial(size_of, strict=True)
        try:
            if upper is not None:
                return await threads.files.run(work.tree, count, upper.path)
            with work.tree.borrow_root(".") as top:
                return await threads.files.run(work.tree, count, top)
        except OSError as exc:
            raise SandboxUsageError(
                f"the size of the work dir cannot be counted: {exc.strerror}",
                code="checkpoint-limit",
                hint="remove directories without permission to read, or nested too deeply",
            ) from exc

    async def freeze(self) -> tuple[Layer, ...]:
        """Make the present state one that is not written any more; return its layers."""
        if self.kind == "plain":
            await self.decide()
            if self.layers is not None:
                return self.layers.lower
        if self.layers is None:
            await self._quiesce()
            return (await self._copied(),)
        frozen = self.layers.present
        if len(mounted(frozen)) > MAX_LAYERS - 1:
            await self._quiesce()
            frozen = (await self._copied(),)
        await self._mount(frozen)
        return frozen

    async def copy_running(self, running: list[LocalRun]) -> tuple[Layer, ...]:
        """Copy the present state while all processes of the session are stopped.

        Raises:
            SandboxBusyError: a process could not be stopped, or has run meanwhile.

        """
        work = self._transport.work
        stopped = await processes_of(self._transport, running)
        try:
            await threads.files.run(work.tree, stopped.stop)
            layer = await self._copied()
            try:
                await threads.files.run(work.tree, stopped.check)
            except BaseException:
                hold((layer,))
                self.release((layer,))
                raise
        except NotStoppedError as exc:
            raise await busy(self._transport, len(running)) from exc
        finally:
            stopped.resume()
        return (layer,)

    async def restore_running(self, layers: tuple[Layer, ...], running: list[LocalRun]) -> bool:
        """Restore in place, below contexts that go on; return False if one of them has run."""
        work = self._transport.work
        stopped = await processes_of(self._transport, running)
        try:
            await threads.files.run(work.tree, stopped.stop)
            await self._restore_in_place(layers)
            await threads.files.run(work.tree, stopped.check)
        except NotStoppedError:
            return False
        finally:
            stopped.resume()
        return True

    async def _mount(self, lower: tuple[Layer, ...]) -> None:
        layers = self.layers
        if layers is None:
            raise RuntimeError("the session has no layers")
        posture, channel = await self._quiesce()
        try:
            last = await layers.mount(lower, posture.root, channel)
        except OSError as exc:
            raise self._transport.pool.spawn_failed("the layers were not mounted", exc) from exc
        self.release(last)
        self._after_mount()
        self.merger.consider()

    def _after_mount(self) -> None:
        """Make commands use the new mount, and have a sandbox ready for the next one."""
        transport = self._transport
        transport.runner.forget_tree()
        posture = transport.postures.get(shape_of(transport.spec.network))
        try:
            transport.pool.keep_first(posture)
        except OSError:
            _log.debug("preparing a spare sandbox failed", exc_info=True)

    async def restore(self, layers: tuple[Layer, ...]) -> None:
        """Make the present state that of these layers."""
        if self.kind == "plain" and await self._try_layers(lambda: layers):
            return
        if self.layers is not None:
            await self._mount(layers)
            return
        await self._quiesce()
        await self._restore_in_place(layers)

    async def _restore_in_place(self, layers: tuple[Layer, ...]) -> None:
        work = self._transport.work
        source = await self.open(layers)
        try:
            with work.tree.borrow_root(".") as top:
                owner = work.tree.owner if work.is_private else None
                restore = functools.partial(
                    restore_tree, source, top, owner=owner, kept=work.tree.kept
                )
                with report_full_disk(work.path):
                    await threads.files.run(work.tree, restore)
        finally:
            os.close(source)
        self._transport.runner.forget_tree()

    async def _copied(self) -> Layer:
        """Copy the present state into a new directory."""
        work = self._transport.work
        layer = self.new_copy()
        try:
            with contextlib.ExitStack() as opened:
                source = work.tree.dup_root()
                opened.callback(os.close, source)
                target = os.open(layer.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, target)
                # On disk, the files of a plain directory may have another owner than layers have.
                is_plain = self.kind == "plain" and work.is_private and os.geteuid() == 0
                owner = layer.store.owner if is_plain else None
                copy = functools.partial(copy_tree, source, target, owner=owner)
                with report_full_disk(os.path.dirname(layer.store.path)):
                    await threads.files.run(work.tree, copy)
        except BaseException:
            hold((layer,))
            self.release((layer,))
            raise
        return layer

    async def open(self, layers: tuple[Layer, ...]) -> int:
        """Return a descriptor of a tree with the content of these layers."""
        transport = self._transport
        if len(layers) == 1 and layers[0].is_copy:
            return os.open(layers[0].path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        posture = transport.postures.get(shape_of(transport.spec.network))
        channel = transport.pool.channel()
        return await open_view(layers, self.store(), channel, root=posture.root)

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
        transport.work.on_remove = self._on_remove
        self._after_mount()

    # Removal.

    def release(self, layers: Iterable[Layer]) -> asyncio.Future[None] | None:
        """Release layers in a thread: removing many files takes longer than anything else.

        Returns what ends with it, unless it has ended.
        """
        try:
            done = threads.removal.start(self, functools.partial(release, tuple(layers)))
        except threads.PoolFullError:
            release(layers)
            return None
        self.removals.add(done)
        done.add_done_callback(self._on_removed)
        return done

    def _on_removed(self, done: asyncio.Future[None]) -> None:
        self.removals.discard(done)
        if not done.cancelled() and done.exception() is not None:
            _log.warning("a layer was not removed", exc_info=done.exception())

    def remove(self, held: list[Layer]) -> None:
        """Release everything at the end of the session, ``held`` included; blocks."""
        held += self._plain
        if self._disk is not None:
            self._disk.close()
        if self.layers is not None:
            held += self.layers.present
            self.layers.close()
        release(held, close=self._store)
