"""Landlock rules of a sandbox that sees the host's own root: what it may read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import DEVICES, ON_FILES, READ, landlock_rights

if TYPE_CHECKING:
    from union.sandbox._plan.rootfs import Shown, View

__all__ = ["PROC_FILES", "landlock_rules"]

PROC_FILES: Final = ("cpuinfo", "loadavg", "meminfo", "stat", "uptime", "version")
"""The only visible files of /proc: they describe the machine, not its processes."""
_READ_FILE, _WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 2, 1 << 1, 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1, 2
_NETWORK_ABI: Final = 4


def landlock_rules(view: View, *, abi: int, network: str) -> list[p.Step]:
    """Return the steps that confine a process to a view of the host's root.

    Args:
        view: what may be read and written; ``source`` is where each path is on the host.
        abi: the Landlock ABI of the kernel.
        network: with ``open`` the TCP ports of the host are not restricted.

    """
    rights = landlock_rights(abi)
    handled_net = _BIND_TCP | _CONNECT_TCP if abi >= _NETWORK_ABI and network != "open" else 0
    steps: list[p.Step] = [
        p.LandlockCreate(rights.handled, handled_net, rights.scoped, rights.attr_size)
    ]
    shown = (*view.system, *view.added)
    steps += [_rule(s, READ) for s in shown if not s.writable]
    steps += [p.LandlockPath(f"/proc/{name}", _READ_FILE) for name in PROC_FILES]
    device = (_READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV) & rights.handled
    steps += [p.LandlockPath(f"/dev/{name}", device) for name in DEVICES]
    steps += [_rule(s, rights.write) for s in shown if s.writable]
    steps.append(p.LandlockRestrict())
    return steps


def _rule(shown: Shown, access: int) -> p.LandlockPath:
    rights = access if shown.is_dir else access & ON_FILES
    return p.LandlockPath(shown.source, rights, identity=shown.identity)
