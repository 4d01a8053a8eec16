"""The work dir of one session as layers of directories, mounted by a process of the launcher.

The layers are mounted in a namespace of their own, the holder (``_plan/layers``). The session's
private root and this process have copies of that mount, so both see the same files.
"""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux import kernel
from union.sandbox._linux.descriptors import close_all, sealed_memfd
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.tree import WorkTree
from union.sandbox._linux.tree_copy import NO_SPACE
from union.sandbox._plan.layers import (
    Layers,
    MappedLayer,
    copy_plan,
    holder_plan,
    layer_parameters,
)
from union.sandbox.on_device._layer_store import hold, mounted, release
from union.sandbox.on_device._probe import wait_for_shared
from union.sandbox.on_device._workdir import disk_full, report_full_disk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._linux.channel import Channel
    from union.sandbox._plan.plan import Plan
    from union.sandbox.on_device._layer_store import Layer, LayerStore
    from union.sandbox.on_device._private_root import PrivateRoot
    from union.sandbox.on_device._probe import Outcome
    from union.sandbox.on_device._workdir import WorkDir

__all__ = [
    "HeldMount",
    "LayersRefusedError",
    "WorkLayers",
    "marks_prefix",
    "mounter",
    "open_view",
    "perform",
]

MAX_LAYERS: Final = 450
"""The kernel accepts 500."""
_NAMESPACES: Final = 2


class LayersRefusedError(OSError):
    """This host cannot mount the layers; ``place`` is the step that failed."""

    def __init__(self, failure: tuple[int, int]) -> None:
        super().__init__(failure[1], os.strerror(failure[1]))
        self.place = failure[0]


@functools.cache
def _is_initial_root() -> bool:
    """Return whether this process is root of the initial user namespace."""
    if not kernel.is_root():
        return False
    ids = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return ids == ["0", "0", "4294967295"]


def marks_prefix() -> str:
    """Return the prefix of the attributes that overlayfs keeps its marks in."""
    return "trusted.overlay." if _is_initial_root() else "user.overlay."


def mounter() -> tuple[int, int] | None:
    """Return the ids of the user namespace that mounts layers; None for root."""
    return None if kernel.is_root() else (os.geteuid(), os.getegid())


class HeldMount:
    """A mount in a namespace of its own, of which private roots get copies."""

    def __init__(self) -> None:
        self._holder: tuple[int, ...] = ()

    def hold(self, namespaces: tuple[int, ...]) -> None:
        """Take over the namespaces that have the mount, in place of the last ones."""
        self.close()
        self._holder = namespaces

    async def copy(self, channel: Channel) -> int:
        """Return one more copy of the mount, for another private root; the caller closes it."""
        (fd,) = await perform(copy_plan(), channel, count=1, shared=self._holder)
        return fd

    def close(self) -> None:
        """Release the mount; copies of it stay."""
        close_all(self._holder)
        self._holder = ()


class WorkLayers(HeldMount):
    """The mounted layers of one session: those that it may not change, and one on top."""

    def __init__(self, work: WorkDir, store: LayerStore, root: PrivateRoot) -> None:
        super().__init__()
        self._work = work
        self._store = store
        identity = root.found.identity
        self._owner = (identity.host_uid, identity.host_gid)
        self._staging = root.found.view.staging
        self._pivot = root.found.view.pivot
        self.lower: tuple[Layer, ...] = ()
        """The layers below, the topmost first; empty before the first ``mount()``."""
        self.upper: Layer | None = None

    @property
    def present(self) -> tuple[Layer, ...]:
        """All layers of the present state, the topmost first."""
        return self.lower if self.upper is None else (self.upper, *self.lower)

    async def mount(
        self, lower: tuple[Layer, ...], root: PrivateRoot, channel: Channel
    ) -> tuple[Layer, ...]:
        """Show ``lower`` with a new, empty layer on top; return the layers shown before.

        No process of the session may run. On failure nothing has changed.

        Raises:
            LayersRefusedError: the host refuses the mount.
            SandboxExecutionError: the disk is full.

        """
        if len(mounted(lower)) > MAX_LAYERS:
            raise LayersRefusedError((32, 7))  # E2BIG
        with self._work.tree.borrow_root(".") as top:
            like = os.fstat(top)
        upper = self._store.new(like)
        try:
            fds = await self._build(lower, upper, channel)
        except BaseException:
            hold((upper,))
            release((upper,))
            raise
        *namespaces, ours, theirs = fds
        try:
            self._check_written(ours, upper)
            outcome = await root.attach(theirs, channel)
            if outcome.failure is not None:
                raise LayersRefusedError(outcome.failure)
        except BaseException:
            close_all((*namespaces, ours))
            hold((upper,))
            release((upper,))
            raise
        finally:
            os.close(theirs)
        hold((upper, *lower))
        last, self.lower, self.upper = self.present, lower, upper
        self.hold(tuple(namespaces))
        self._work.use(WorkTree(self._work.path, fd=ours), self._owner)
        return last

    def _check_written(self, mount: int, upper: Layer) -> None:
        """Raise if the kernel could not make its directory in ``work``: it mounts read-only then.

        Raises:
            SandboxExecutionError: the disk is full.
            LayersRefusedError: for any other reason.

        """
        if os.fstatvfs(mount).f_flag & os.ST_RDONLY:
            with report_full_disk(os.path.dirname(self._store.path)):
                os.mkdir(f"{upper.work}/room", 0o700)
            raise LayersRefusedError((Layers.op, errno.EROFS))

    async def _build(
        self, lower: tuple[Layer, ...], upper: Layer, channel: Channel
    ) -> tuple[int, ...]:
        paths, mapped, fds = self._mapped(lower)
        try:
            plan = holder_plan(
                layer_parameters(
                    paths, upper=upper.path, work=upper.work, trusted=_is_initial_root()
                ),
                owner=mounter(),
                staging=self._staging,
                pivot=self._pivot,
                mapped=mapped,
            )
            return await perform(plan, channel, count=_NAMESPACES + 2, fds=fds)
        except LayersRefusedError as exc:
            # The kernel makes directories in ``work``. Other steps have limits of their own.
            if exc.place == Layers.op and exc.errno in NO_SPACE:
                raise disk_full(os.path.dirname(self._store.path)) from exc
            raise
        finally:
            close_all(fds)

    def _mapped(
        self, lower: Sequence[Layer]
    ) -> tuple[list[str], list[MappedLayer], tuple[int, ...]]:
        """Return the paths of the layers, with those of other owners mapped to this session."""
        mapped: list[MappedLayer] = []
        owners: list[tuple[int, int]] = []
        fds: list[int] = []
        paths = []
        try:
            for layer in mounted(lower):
                owner = layer.store.owner
                if not kernel.is_root() or owner == self._owner:
                    paths.append(layer.path)
                    continue
                if owner not in owners:
                    fds.append(Launcher.current().userns(inside=owner, outside=self._owner))
                    owners.append(owner)
                at = self._store.directory(f"mapped-{len(mapped)}")
                mapped.append(MappedLayer(layer.path, at, owners.index(owner)))
                paths.append(at)
        except BaseException:
            close_all(fds)
            raise
        return paths, mapped, tuple(fds)


async def open_view(
    layers: Sequence[Layer], store: LayerStore, channel: Channel, *, root: PrivateRoot
) -> int:
    """Mount layers for reading alone, and return a descriptor, which the caller closes."""
    paths = [layer.path for layer in mounted(layers)]
    if len(paths) == 1:
        paths.append(store.directory("empty"))  # overlayfs wants two
    view = root.found.view
    plan = holder_plan(
        layer_parameters(paths, upper=None, work=None, trusted=_is_initial_root()),
        owner=mounter(),
        staging=view.staging,
        pivot=view.pivot,
        copies=1,
    )
    user, mount, fd = await perform(plan, channel, count=_NAMESPACES + 1)
    close_all((user, mount))
    return fd


async def perform(
    plan: Plan,
    channel: Channel,
    *,
    count: int,
    fds: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> tuple[int, ...]:
    """Perform a plan that ends with descriptors for this process."""
    encoded = sealed_memfd("plan", plan.encode())
    try:
        _, sock = channel.prepare(plan, encoded, fds=fds, shared=shared)
    finally:
        os.close(encoded)
    try:
        outcome: Outcome
        outcome, received = await wait_for_shared(sock, count)
    finally:
        sock.close()
    if outcome.failure is not None:
        raise LayersRefusedError(outcome.failure)
    return received
