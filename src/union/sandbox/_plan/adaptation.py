"""Plans for a kernel that lacks some of what they use: gVisor's.

Linux has every feature since 5.12. gVisor implements the same system calls, but not all of them:
the same sandbox is built there by other calls, and what cannot be built is reported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LINUX", "KernelFeatures", "adapted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFeatures:
    """Features that plans and reports depend on; False where the kernel lacks one."""

    cgroup_namespaces: bool = True
    mount_trees: bool = True
    """Whether open_tree, move_mount and mount_setattr do what plans require."""
    securebits: bool = True
    terminal_options: bool = True
    """Whether a devpts has a limit, and ``mode=`` is that of its terminals."""
    init_is_immune: bool = True
    """Whether the first process of a pid namespace ignores signals from inside."""
    read_only_metadata: bool = True
    """Whether a read-only mount protects the mode, owner and times of files on a tmpfs."""
    own_proc_net: bool = True
    """Whether /proc/net shows only the sockets of the network namespace."""
    own_process_count: bool = True
    """Whether the limit on processes counts those of one user namespace only."""
    nf_tables: bool = True


LINUX: Final = KernelFeatures()


def adapted(steps: Iterable[p.Step], kernel: KernelFeatures) -> tuple[p.Step, ...]:
    """Return the same steps for a kernel that lacks some of what they use."""
    found = tuple(steps)
    if kernel == LINUX:
        return found
    made = [_adapted(step, kernel) for step in found]
    if not kernel.mount_trees and p.Detach() in made:
        # A descriptor can be bound only while its mount is attached. Until the caller's root is
        # detached it covers the private one, so "/" is remounted after that.
        late = (p.Detach(), p.Remount("/"))
        made = [step for step in made if step not in late]
        last = max((at for at, step in enumerate(made) if isinstance(step, p.Bind)), default=-1)
        made[last + 1 : last + 1] = [step for step in late if step in found]
    return tuple(made)


def _adapted(step: p.Step, kernel: KernelFeatures) -> p.Step:
    match step:
        case p.Bind() if not kernel.mount_trees and step.path.startswith("/proc/"):
            # Parts of the caller's /proc cannot be bound there; those of the new one can.
            return p.Cover(step.path, step.path)
        case p.Bind() if not kernel.mount_trees:
            return dataclasses.replace(step, classic=True)
        case p.Lockdown() if not kernel.securebits:
            return dataclasses.replace(step, securebits=0)
        case p.Devpts() if not kernel.terminal_options:
            return dataclasses.replace(step, options="newinstance,ptmxmode=0666")
        case _:
            return step
