"""Why a step is refused on this machine, and what to do: the one place for causes and remedies.

The kernel says which step failed and with which errno. What stands behind that is read from the
places where the kernel shows it: settings, the filter and the profile of this process.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._linux import kernel
from union.sandbox._plan.plan import OP_NAMES
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cause", "cause", "too_old", "unavailable"]

BIND, ROOT, PROC, REMOUNT, NETLINK, ATTRS, RESIZE, WRAP, ENTER = 1, 2, 7, 9, 11, 23, 24, 25, 26
COUNTER = 28
CLONE, IDMAP, IDS, PRIVATE = 101, 102, 104, 105
_CAP_SETFCAP: Final = 31

_WEAKER: Final = {
    PROC: "showing the container's own",
    NETLINK: "proxies alone",
    ENTER: "moving it over the caller's",
    IDMAP: "running as root's own id",
    COUNTER: "counters that are shared with the caller",
}
"""What takes the place of a step that is refused, unless the caller asked for ``strict``."""


class Cause(NamedTuple):
    """What is in the way, and the remedy."""

    what: str
    hint: str


def unavailable(
    backend: str, op: int, error: int, *, strict: bool, said: str = ""
) -> BackendUnavailableError:
    """The error for a sandbox that could not be built; ``said`` is what bwrap wrote."""
    what, hint = cause(op, error)
    if op == ENTER and backend == "bubblewrap":
        what += ", which bwrap needs"
        hint += ", or pass backend='userns', which has another way"
    elif strict and op in _WEAKER:
        what += f", and strict=True rules out {_WEAKER[op]}"
        hint += ", or drop strict=True"
    name = OP_NAMES.get(op, f"step {op}")
    told = [f"{name}: {os.strerror(error)}"] if error else []
    told += [f"bwrap says: {said}"] if said else []
    return BackendUnavailableError(
        f"the {backend!r} backend does not work here: {what} ({'; '.join(told)})",
        backend=backend,
        missing=(name,),
        hint=hint,
    )


def cause(op: int, error: int) -> Cause:
    """What stands behind a step that failed."""
    if kernel.is_gvisor():
        return _GVISOR
    if error in _USED_UP:
        return _USED_UP[error]
    if op in {WRAP, ATTRS, RESIZE}:
        return _of_bwrap(op, error)
    if op == CLONE:
        return _of_namespaces(error)
    if op == IDS and os.geteuid() == 0 and not kernel.capabilities() >> _CAP_SETFCAP & 1:
        return _NO_SETFCAP
    if op == IDS and _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if op == PROC and error == errno.EPERM:
        return _MASKED_PROC
    if op in _OF_STEP:
        return _OF_STEP[op](error)
    if error == errno.ENOSYS:
        return too_old()
    if op in {PRIVATE, ROOT, BIND, REMOUNT} and error in {errno.EPERM, errno.EACCES}:
        return _of_mounts()
    return Cause("a sandbox could not be built", "please report this, with what sbx doctor says")


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _profile() -> str:
    """The AppArmor profile of this process; empty where there is none, or none that confines."""
    try:
        name = Path("/proc/self/attr/current").read_text(encoding="ascii").strip("\0\n ")
    except OSError:
        return ""
    return "" if name == "unconfined" else name


def _of_namespaces(error: int) -> Cause:
    if _sysctl("kernel.unprivileged_userns_clone") == "0":
        return Cause(
            "user namespaces are switched off for ordinary users",
            "as root: sysctl -w kernel.unprivileged_userns_clone=1",
        )
    if _sysctl("user.max_user_namespaces") == "0" or error == errno.ENOSPC:
        return Cause(
            "the limit on user namespaces is used up",
            "as root: sysctl -w user.max_user_namespaces=15000",
        )
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if error in {errno.EPERM, errno.ENOSYS} and kernel.is_filtered():
        return Cause(
            "this container's seccomp profile refuses user namespaces",
            "run the container with seccomp=unconfined (Kubernetes: securityContext: "
            "seccompProfile: Unconfined), with a profile that allows clone, unshare and mount, or "
            "with the SYS_ADMIN capability",
        )
    return Cause(
        "the kernel makes no user namespaces for this process",
        "is it built with CONFIG_USER_NS, and does this process run outside a chroot?",
    )


def _of_bwrap(op: int, error: int) -> Cause:
    """When bwrap fails, or what it has started may not finish its work.

    Without an errno: it gave up by itself, and the same sandbox could be built without it.
    """
    also = "" if error else "; backend='userns' works here"
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return Cause(
            "AppArmor restricts what bwrap may do in a user namespace on this host",
            "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an "
            "AppArmor profile with the 'userns' permission that leaves capabilities to what it "
            f"starts{also}",
        )
    if op == WRAP and error:
        return Cause(
            "bwrap does not start",
            "it is started as an id without rights where the caller is root: everybody must be "
            "allowed to execute it, and to read its libraries",
        )
    if op == WRAP:
        return Cause(
            "bwrap gave up, though the same sandbox can be built without it",
            f"try it by hand: bwrap --unshare-all --ro-bind / / true{also}",
        )
    return Cause(
        "what bwrap starts is not allowed to finish the set-up",
        "a security profile for bwrap takes its capabilities away; pass backend='userns'",
    )


def _of_id_maps(error: int) -> Cause:
    if error in NO_ID_MAPS:
        return Cause(
            "a file system that the session shows has no id-mapped mounts",
            "keep the work dir and the named paths on a file system that has them (ext4, XFS, "
            "Btrfs, tmpfs; overlayfs from Linux 6.x on)",
        )
    return Cause(
        "a path that the session shows was replaced or removed while it was being mounted",
        "name paths that sandboxed code cannot change, and try again",
    )


def _of_root(_: int) -> Cause:
    return _NO_PIVOT if kernel.is_filtered() else _NO_ROOT


def _of_mounts() -> Cause:
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if kernel.is_filtered():
        return Cause(
            "this container's seccomp profile refuses mounts inside a user namespace",
            "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined), or with a "
            "profile that allows mount, open_tree, move_mount and mount_setattr",
        )
    profile = _profile()
    if profile:
        return Cause(
            f"the security profile {profile!r} refuses mounts inside a user namespace",
            "run the container with apparmor=unconfined (Kubernetes: appArmorProfile: Unconfined)",
        )
    return Cause("mounts are refused inside a user namespace", "")


def too_old() -> Cause:
    """Why a call is not implemented."""
    if kernel.is_gvisor():
        return _GVISOR
    if kernel.is_filtered():
        return _of_mounts()
    return Cause(f"the kernel {os.uname().release} is too old", "Linux 5.12 or newer is needed")


NO_ID_MAPS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
"""The kernel, or the file system, has no id-mapped mounts; EPERM: not for a container's root."""
_NO_COUNTER: Final = Cause(
    "the limits of a user namespace in /proc/sys/user cannot be set",
    "mount /proc/sys writable in this container, or run as root, where a session has an id of "
    "its own",
)
_NO_ROOM: Final = "raise the limit on open files (ulimit -n), or close sessions that are done"
_USED_UP: Final = {
    errno.EAGAIN: Cause(
        "no more processes may be started",
        "raise the limit on processes (ulimit -u, or pids.max of the control group)",
    ),
    errno.ENOMEM: Cause("there is not enough memory", "free some, or raise the limit (ulimit -v)"),
    errno.EMFILE: Cause("no descriptor is left", _NO_ROOM),
    errno.ENFILE: Cause("no descriptor is left on this machine", "as root: sysctl fs.file-max"),
    errno.ESTALE: Cause(
        "a file or directory that the session shows was replaced while the sandbox was being built",
        "try again; if this repeats, another session or program keeps changing the directories "
        "above a path that this session shows",
    ),
}
"""What says nothing about the machine's kind, whatever the step."""
_MASKED_PROC: Final = Cause(
    "this container masks /proc, so a fresh one is refused",
    "run the container with an unmasked /proc (Kubernetes: procMount: Unmasked with hostUsers: "
    "false; Docker: --security-opt systempaths=unconfined)",
)
_NO_REDIRECT: Final = Cause(
    "the kernel refuses the rule that leads every connection to the policy",
    "as root: modprobe nf_tables nft_chain_nat",
)
_NO_SETFCAP: Final = Cause(
    "this process is root without CAP_SETFCAP, and the kernel then maps no id",
    "run as an ordinary user (Kubernetes: runAsUser: 1000), or grant the SETFCAP, SETUID "
    "and SETGID capabilities that containers have by default",
)
_NO_PIVOT: Final = Cause(
    "this container's seccomp profile refuses pivot_root",
    "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined), or with a profile "
    "that allows pivot_root",
)
_NO_ROOT: Final = Cause(
    "a private root cannot be entered", "is this process in a chroot, or in an initramfs?"
)
_APPARMOR: Final = Cause(
    "AppArmor restricts user namespaces on this host",
    "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give this program an "
    "AppArmor profile with the 'userns' permission",
)
_GVISOR: Final = Cause(
    "this container runs in gVisor, whose kernel lacks what sandboxes inside it need",
    "gVisor isolates this container as a whole already; for sandboxes inside it, run the container "
    "with another runtime (Kubernetes: another runtimeClassName)",
)
_OF_STEP: Final[dict[int, Callable[[int], Cause]]] = {
    NETLINK: lambda _: _NO_REDIRECT,
    COUNTER: lambda _: _NO_COUNTER,
    IDMAP: _of_id_maps,
    ENTER: _of_root,
}
