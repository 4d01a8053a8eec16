"""Isolation: the layers that are enforced, machine-readable and printable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Isolation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The isolation layers between sandboxed code and the host, verified on a live sandbox.

    ``root``: how the private root was entered: ``pivot`` (pivot_root), ``move`` (a mount moved over
    the caller's root, where pivot_root is not permitted) or ``host`` (no private root).
    ``proc``: ``fresh`` (only processes of the sandbox), ``inherited`` (/proc of this container,
    which masks it and so allows no new one), ``hidden`` (a few files about the machine, and no
    process) or ``host``.
    ``ids``: ``unprivileged`` (an id that owns nothing on the host), ``caller`` or ``host``.
    ``securebits``: whether the kernel locks the ways in which an exec could raise capabilities;
    without it ``no_new_privs`` and an id other than 0 have the same effect.
    ``proc_net``: whose sockets /proc/net lists: ``own``, ``shared`` (those of every network
    namespace of this container, as in gVisor), ``hidden`` (it is not readable) or ``host``.
    ``read_only``: what is protected of paths that are shown read-only: ``full``, ``contents`` (not
    the mode and times of files that belong to the sandbox's id, as in gVisor) or ``none``.
    ``limits``: what enforces each limit: ``cgroup-v2``, ``cgroup-v1``, ``rlimit``,
    ``rlimit-shared`` (counted over all processes of this id, as in gVisor), ``tmpfs``,
    ``watch`` (the process tree is looked at: its memory every few milliseconds, its epoll watches
    and descriptors in flight every 0.25 s), ``nodes`` (only the requested device nodes exist),
    ``namespace`` (a limit of the session's user namespace or id), ``filter`` (refused by the
    system-call filter) or ``none``.
    ``egress``: what enforces the network policy: ``kernel``, ``proxy-only``, ``mediated`` (each
    connection is made by the host and handed over) or ``none``.
    ``tmp`` and ``shm``: ``private`` (mounts of the sandbox's own), ``directory`` (a directory of
    the session, in TMPDIR), ``none`` or ``host``.
    ``signals``: what keeps signals inside: ``namespace``, ``kernel`` (Landlock), ``notified`` (the
    runner sends each of them) or ``none``.
    ``processes``: how the processes of a command are found when it ends: ``tree`` (the kernel
    knows all descendants), ``label`` (by the sandbox that they inherit) or ``session`` (a process
    that leaves its session and loses its parent is not found).
    ``persist``: what stays between commands: ``workdir`` (only the work dir), or ``machine`` (also
    /tmp, /var/tmp, /dev/shm and processes; commands have one pid namespace, and each has a user
    and a network namespace of its own).
    ``loopback``: ``private`` (a loopback of its own), ``host``, ``proxies`` (of the host's only the
    two ports of the run's proxies) or ``none``.
    ``layers``: what the work dir is made of: ``plain`` (one directory: no checkpoint was taken
    yet), ``overlay`` (layers of directories, one for each checkpoint), ``overlay-tmpfs`` (the same
    in memory) or ``copy`` (checkpoints are copies).
    ``python``: how waiting Pythons begin: ``forked`` (from the session's template, with whose
    address layout and hash seed) or ``started`` (each by itself).
    """

    backend: str
    """The backend of the session."""
    namespaces: tuple[str, ...] = ()
    """The kinds of namespaces that a sandbox has of its own."""
    root: str = "host"
    proc: str = "host"
    ids: str = "host"
    landlock_abi: int = 0
    """The version of Landlock that is enforced; 0 for none."""
    seccomp: str = ""
    """Digest of the system-call filter; empty for none."""
    capabilities: tuple[str, ...] | None = None
    """Capabilities left in any set; None if they are not restricted. With ``landlock`` the bounding
    set, which no_new_privs makes ineffective, is not counted."""
    no_new_privs: bool = False
    """Whether no program inside can gain privileges by an exec."""
    securebits: bool = False
    proc_net: str = "host"
    read_only: str = "none"
    limits: tuple[tuple[str, str], ...] = ()
    egress: str = "none"
    tmp: str = "host"
    shm: str = "host"
    signals: str = "none"
    processes: str = "tree"
    loopback: str = "host"
    persist: str = "workdir"
    layers: str = "plain"
    python: str = "started"
    profile: str = ""
    """Digest of the profile of ``sandbox-exec``; empty for none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return dataclasses.asdict(self) | {"limits": dict(self.limits)}

    def __str__(self) -> str:
        return "\n".join(f"{name:<13} {_shown(value)}" for name, value in self.to_dict().items())


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items()) or "-"
    if isinstance(value, tuple | list):
        return " ".join(str(v) for v in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in {None, "", 0} else str(value)
