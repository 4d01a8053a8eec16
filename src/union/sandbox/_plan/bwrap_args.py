"""Divide the steps of a plan into arguments for ``bwrap`` and steps for the runner inside.

``bwrap`` creates the mounts and the links. The runner performs the rest in its original order: the
parts that bwrap cannot do (inode limits of a tmpfs, flags such as noexec) and those that must come
last (network, capabilities, Landlock, the filter). Both halves come from one list of steps, so that
a sandbox is the same with either builder.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NEEDED", "divide", "mount_args", "namespace_args", "staged"]

NEEDED: Final = (
    "--args",
    "--as-pid-1",
    "--bind",
    "--cap-add",
    "--cap-drop",
    "--dev-bind",
    "--dir",
    "--gid",
    "--hostname",
    "--proc",
    "--ro-bind",
    "--symlink",
    "--tmpfs",
    "--uid",
    "--unshare-cgroup",
    "--unshare-ipc",
    "--unshare-net",
    "--unshare-pid",
    "--unshare-user",
    "--unshare-uts",
)
"""Every option used here, except the one for an existing user namespace."""
USERNS_FD: Final = "7"
"""The file descriptor of that namespace in native/wrap.c."""
_INSIDE_STAGING: Final = "/run/staged"
"""Where bwrap mounts the sources of binds that the runner performs."""
_COVER_STAGING: Final = p.Tmpfs(_INSIDE_STAGING, 4096, mode=0o555, inodes=1, read_only=True)
_TO_MOUNT: Final = ("CAP_SYS_ADMIN", "CAP_SETPCAP")
_FOR_COUNTERS: Final = ("CAP_SYS_RESOURCE",)
_FOR_NETWORK: Final = ("CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE")


def namespace_args(
    *,
    namespaces: tuple[str, ...],
    uid: int,
    gid: int,
    enter_userns: bool,
    counters: bool = False,
) -> list[str]:
    """Return options for the namespaces, the ids, and the capabilities of the runner.

    ``--die-with-parent`` is not used: a bwrap that is killed between two of its own steps leaves a
    child that waits for it for ever. The runner watches the launcher itself, and bwrap ends with
    the runner.
    """
    args = ["--userns", USERNS_FD] if enter_userns else ["--unshare-user"]
    args += [f"--unshare-{name}" for name in namespaces if name not in {"user", "mount"}]
    args += ["--uid", str(uid), "--gid", str(gid), "--as-pid-1"]
    args += ["--cap-drop", "ALL"]
    network = _FOR_NETWORK if "net" in namespaces else ()
    for cap in (*_TO_MOUNT, *network, *(_FOR_COUNTERS if counters else ())):
        args += ["--cap-add", cap]
    return args


def divide(steps: Iterable[p.Step]) -> tuple[list[str], tuple[p.Step, ...]]:
    """Return the arguments for bwrap and the steps that remain for the runner."""
    args: list[str] = []
    inside: list[p.Step] = []
    staged_binds = 0
    for step in steps:
        if isinstance(step, p.Bind) and step.existing:
            # bwrap would create a missing mount point, in a directory of the caller. The runner
            # does not, so bwrap only brings the source into the private root.
            if not staged_binds:
                # The runner opens all sources before its first step, so they may be covered here.
                inside.append(_COVER_STAGING)
            at = f"{_INSIDE_STAGING}/{staged_binds}"
            staged_binds += 1
            args += [_bind_option(step.attrs), step.source, at]
            inside.append(dataclasses.replace(step, source=at, fd=None, idmap=None))
            continue
        taken = mount_args(step)
        args += taken
        if isinstance(step, p.Bind):
            inside += _rest_of_bind(step)
        elif isinstance(step, p.Tmpfs):
            inside.append(p.Resize(step.path, step.mode, step.options))
        elif isinstance(step, p.Root):
            # bwrap has entered a root of its own, which has no limit yet.
            inside.append(p.Resize("/", 0o755, step.options))
        elif not taken and not isinstance(step, p.Enter | p.Detach):
            inside.append(step)
    return args, tuple(inside)


def mount_args(step: p.Step) -> list[str]:
    """Return the bwrap options of one step; empty for a step of the runner."""
    match step:
        case p.Bind():
            return [_bind_option(step.attrs), step.source, step.path]
        case p.Mkdir():
            return ["--dir", step.path]
        case p.Symlink():
            return ["--symlink", step.target, step.path]
        case p.Tmpfs():
            return ["--tmpfs", step.path]
        case p.Proc():
            return ["--proc", step.path]
        case p.Hostname():
            return ["--hostname", step.path]
    return []


_GIVEN: Final = {
    "--dev-bind": p.NOSUID,
    "--ro-bind": p.RDONLY | p.NOSUID | p.NODEV,
    "--bind": p.NOSUID | p.NODEV,
}


def _bind_option(attrs: int) -> str:
    if not attrs & p.NODEV:
        return "--dev-bind"
    return "--ro-bind" if attrs & p.RDONLY else "--bind"


def _rest_of_bind(step: p.Bind) -> list[p.Step]:
    """Return steps for flags that bwrap lacks, and for the check of the identity."""
    rest: list[p.Step] = []
    extra = step.attrs & ~_GIVEN[_bind_option(step.attrs)]
    if extra:
        rest.append(p.Attrs(step.path, extra))
    if step.identity[1]:
        rest.append(p.Identity(step.path, step.identity))
    return rest


def staged(steps: Iterable[p.Step], place: str) -> tuple[tuple[p.Step, ...], tuple[p.Step, ...]]:
    """Return steps that mount the sources below ``place``, and the steps that use them.

    For a caller that is root: bwrap opens sources with the id of the sandbox, which cannot enter
    directories of root, and bwrap does not create id-mapped mounts.
    """
    before: list[p.Step] = [p.Tmpfs(place, 1 << 20, mode=0o755, inodes=4096)]
    after: list[p.Step] = []
    for step in steps:
        if isinstance(step, p.Bind):
            at = f"{place}/{len(before)}"
            before.append(dataclasses.replace(step, path=at, existing=False))
            after.append(p.Bind(at, step.path, step.attrs, existing=step.existing))
        else:
            after.append(step)
    return tuple(before), tuple(after)
