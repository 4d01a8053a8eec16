"""Plans for the work dir of a session that has checkpoints: layers of directories (overlayfs).

The layers are mounted once, by a process of their own, in a mount namespace with nothing else in
it: the *holder*. Private roots get copies of that mount, so that all of them show the same one: the
kernel allows one mount of layers for each directory that is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import held_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._plan.rootfs import View

__all__ = [
    "Attach",
    "Layers",
    "MappedLayer",
    "Tree",
    "attach_plan",
    "copy_plan",
    "holder_plan",
    "layer_parameters",
    "scratch_plan",
]

NEW_MOUNT: Final = 0x00020000
NEW_USER: Final = 0x10000000
HELD_AT: Final = "/work"
"""Where the holder has the mount."""
_HOLDER_OPTIONS: Final = "mode=700,size=64k,nr_inodes=16"


@dataclass(frozen=True, slots=True)
class Layers(p.Step):
    """Make a mount of a file system with these parameters, for ``Attach``."""

    op: ClassVar[int] = 32
    parameters: tuple[tuple[str, str], ...]
    kind: str = "overlay"
    attrs: int = p.NOSUID | p.NODEV

    def integers(self) -> tuple[int, ...]:
        return (self.attrs,)

    def blobs(self) -> tuple[bytes, ...]:
        texts = (text for pair in self.parameters for text in pair)
        return b"".join(map(p.text, texts)), p.text(self.kind)


@dataclass(frozen=True, slots=True)
class Attach(p.Step):
    """Attach a mount at ``path``: a descriptor sent with the plan, or the last ``Layers``."""

    op: ClassVar[int] = 33
    path: str
    fd: int | None = None

    def integers(self) -> tuple[int, ...]:
        return (0 if self.fd is None else self.fd + 1,)

    def blobs(self) -> tuple[bytes, ...]:
        return (p.text(self.path),)


@dataclass(frozen=True, slots=True)
class Tree(p.Step):
    """Send a copy of the mount at ``path`` to the host."""

    op: ClassVar[int] = 34
    path: str

    def blobs(self) -> tuple[bytes, ...]:
        return (p.text(self.path),)


@dataclass(frozen=True, slots=True)
class MappedLayer:
    """A layer whose owner is mapped to the id of the session."""

    source: str
    at: str
    """An existing directory, over which it is mounted in the holder."""
    idmap: int
    """Index of the user namespace among the descriptors."""


def layer_parameters(
    lower: Sequence[str], *, upper: str | None, work: str | None, trusted: bool
) -> tuple[tuple[str, str], ...]:
    """Return the parameters of overlayfs.

    Args:
        lower: the layers that are not written, the topmost first.
        upper: the directory that is written; None for a mount that is only read.
        work: an empty directory beside ``upper``.
        trusted: keep its own marks where only the host's root can write them. A user namespace
            keeps them in attributes of the user; a directory of a layer below can then not be
            renamed (EXDEV).

    """
    written: list[tuple[str, str]] = []
    if upper is not None and work is not None:
        # Nothing is synchronised with the disk: a private work dir does not outlive its host.
        written = [("upperdir", upper), ("workdir", work), ("volatile", "")]
    if trusted:
        marks = [("index", "off"), ("metacopy", "off"), ("redirect_dir", "on")]
    else:
        marks = [("userxattr", "")]
    return (
        ("source", "work"),
        *(("lowerdir+", path) for path in lower),
        *written,
        *marks,
    )


def holder_plan(
    parameters: tuple[tuple[str, str], ...],
    *,
    owner: tuple[int, int] | None,
    staging: str,
    pivot: bool,
    mapped: Sequence[MappedLayer] = (),
    copies: int = 2,
) -> p.Plan:
    """Return the plan of the holder; it sends its namespaces and ``copies`` of the mount.

    Args:
        parameters: those of the layers, with paths of the host.
        owner: the caller's ids, for a user namespace; None for root, which needs none.
        staging: a directory of the host over which the holder's own root is mounted at first.
        pivot: enter it by pivot_root; otherwise it is moved.
        mapped: layers that are mounted with mapped ids first.
        copies: number of copies of the mount.

    """
    ids = None if owner is None else ((owner[0], owner[0]), (owner[1], owner[1]))
    steps: list[p.Step] = [
        p.Bind(one.source, one.at, p.NOSUID | p.NODEV, idmap=one.idmap, existing=True)
        for one in mapped
    ]
    steps += [
        Layers(parameters),
        p.Root(staging, _HOLDER_OPTIONS),
        p.Enter(move=not pivot),
        *((p.Detach(),) if pivot else ()),
        p.Mkdir(HELD_AT),
        Attach(HELD_AT),
        p.Share(),
        *(Tree(HELD_AT) for _ in range(copies)),
    ]
    return p.Plan(
        steps=tuple(steps),
        clone_flags=NEW_MOUNT if ids is None else NEW_MOUNT | NEW_USER,
        uid=None if ids is None else ids[0],
        gid=None if ids is None else ids[1],
        deny_setgroups=ids is not None,
    )


def scratch_plan(
    *, size: int, inodes: int, owner: tuple[int, int] | None, staging: str, pivot: bool
) -> p.Plan:
    """Return the plan of a holder whose work dir is an empty tmpfs of a limited size."""
    options = (("source", "work"), ("size", str(size)), ("nr_inodes", str(inodes)), ("mode", "755"))
    plan = holder_plan(options, owner=owner, staging=staging, pivot=pivot)
    steps = tuple(
        Layers(step.parameters, "tmpfs", step.attrs) if isinstance(step, Layers) else step
        for step in plan.steps
    )
    return p.Plan(
        steps=steps,
        clone_flags=plan.clone_flags,
        uid=plan.uid,
        gid=plan.gid,
        deny_setgroups=plan.deny_setgroups,
    )


def copy_plan() -> p.Plan:
    """Return the plan that starts from the holder and sends one more copy of its mount."""
    return p.Plan(steps=(Tree(HELD_AT),), clone_flags=NEW_MOUNT)


def attach_plan(view: View) -> p.Plan:
    """Return the plan that starts from a private root and attaches descriptor 0 as its work dir.

    The plain directory below stays mounted, covered and read-only. No sandbox has a capability to
    uncover it.
    """
    place = held_place(view)
    return p.Plan(
        steps=(
            p.Remount(place, p.RDONLY | p.NOSUID | p.NODEV),
            Attach(place, fd=0),
            p.Share(),
        ),
        clone_flags=NEW_MOUNT,
    )
