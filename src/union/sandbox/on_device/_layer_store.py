"""The directories that checkpoints consist of, and who uses them.

A layer is a directory that no process writes any more, or the one that a session writes now.
Sessions and checkpoints hold layers; the last one that releases a layer removes it. So the fork of
a session goes on when that session closes. All directories have the marker and the lock of private
work dirs (``_linux/owned_dir``): what a killed process leaves is removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from union.sandbox._linux.removal import remove_tree
from union.sandbox.on_device._workdir import make_private_dir, report_full_disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from union.sandbox._linux.layer_merge import TreeCost
    from union.sandbox._linux.owned_dir import OwnedDir

__all__ = ["Layer", "LayerStore", "MergedLayer", "hold", "mounted", "release"]

_lock = threading.Lock()
"""Guards the counts: forks may belong to event loops of other threads."""


class LayerStore:
    """A private directory with layers; or one that is a layer itself (``is_layer``)."""

    def __init__(self, owned: OwnedDir, *, owner: tuple[int, int], is_layer: bool = False) -> None:
        self.owned = owned
        self.path = owned.path
        self.owner = owner
        """User and group of the files, on disk."""
        self.is_layer = is_layer
        self.users = 1
        """Layers that exist, and one for the session as long as it is open."""
        self._numbers = itertools.count(1)

    @classmethod
    def make(cls, place: str | None, *, owner: tuple[int, int]) -> LayerStore:
        """Create an empty store below ``place``, or in the default directory."""
        return cls(make_private_dir(place), owner=owner)

    def new(self, like: os.stat_result) -> Layer:
        """Create an empty layer, whose top has the mode of ``like``."""
        path = f"{self.path}/{next(self._numbers)}"
        layer = Layer(self, f"{path}/files", work=f"{path}/work")
        with report_full_disk(os.path.dirname(self.path)):
            os.mkdir(path, 0o700)
            try:
                for directory in (layer.path, layer.work):
                    os.mkdir(directory, 0o700)
                os.chmod(layer.path, stat.S_IMODE(like.st_mode))
                if os.geteuid() == 0:
                    os.chown(layer.path, *self.owner)
            except BaseException:
                remove_tree(path)
                raise
        with _lock:
            self.users += 1
        return layer

    def directory(self, name: str) -> str:
        """Return an empty directory of the store, made at its first use."""
        path = f"{self.path}/{name}"
        with report_full_disk(os.path.dirname(self.path)):
            os.makedirs(path, 0o700, exist_ok=True)
        return path


class Layer:
    """One directory of a store, held by a number of sessions and checkpoints."""

    def __init__(self, store: LayerStore, path: str, *, work: str = "") -> None:
        self.store = store
        self.path = path
        self.work = work
        """An empty directory that overlayfs needs beside one that it writes."""
        self.is_copy = False
        """Whether it has the whole state, as plain files."""
        self.holders = 0
        self.size: int | None = None
        """Bytes on disk, once they were counted."""
        self.cost: TreeCost | None = None
        """Of merging it with others, once it was counted."""
        self.is_single = False
        """Whether it is not merged with others."""
        self.merged: MergedLayer | None = None
        """What is mounted in place of this layer and some below it."""


@dataclass(frozen=True, slots=True)
class MergedLayer:
    """A directory that shows the same as a layer and those that were below it when it was made.

    Layers always have the same ones below them, so every list with the first has the others too.
    """

    layer: Layer
    below: tuple[Layer, ...]

    @property
    def count(self) -> int:
        """Number of layers that it replaces."""
        return 1 + len(self.below)


def mounted(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers to mount for these: merged ones where there are any.

    They exist as long as the layers that were passed are held.
    """
    found: list[Layer] = []
    at = 0
    while at < len(layers):
        merged = layers[at].merged
        if merged is None:
            found.append(layers[at])
            at += 1
            continue
        end = at + merged.count
        if tuple(layers[at + 1 : end]) != merged.below:
            raise RuntimeError("a layer has others below it than before")
        found.append(merged.layer)
        at = end
    return tuple(found)


def hold(layers: Iterable[Layer]) -> None:
    """Hold each layer once more."""
    with _lock:
        for layer in layers:
            layer.holders += 1


def release(layers: Iterable[Layer], *, close: LayerStore | None = None) -> None:
    """Release each layer, and remove those that are not held any more. Blocks for the removal.

    Args:
        layers: the layers.
        close: a store whose session is closed.

    """
    with _lock:
        unused = []
        for layer in layers:
            layer.holders -= 1
            if layer.holders == 0:
                unused.append(layer)
                if layer.merged is not None:
                    unused.append(layer.merged.layer)
    for layer in unused:
        if not layer.store.is_layer:
            remove_tree(os.path.dirname(layer.path))
    # Only now: another thread may release the last user of the store, and removes it as a whole.
    with _lock:
        stores = [layer.store for layer in unused]
        for store in (*stores, *((close,) if close else ())):
            store.users -= 1
        empty = [store for store in {*stores, close} if store is not None and store.users == 0]
    for store in empty:
        store.users = -1
        store.owned.remove()
