"""Why a sandbox, a step or a command failed, and the remedy: the one place for causes.

The launcher reports the operation that failed and its errno. The cause behind them is read where
the kernel shows it: settings, the system-call filter and the security profile of this process.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._core.events import Failed
from union.sandbox._linux import kernel
from union.sandbox._linux.protocol import FAILURE_NAMES, FailurePlace, operation
from union.sandbox._plan import plan
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NO_ID_MAPS",
    "Cause",
    "bwrap_message",
    "cause",
    "explain",
    "no_descriptors",
    "too_old",
    "unavailable",
]

_CAP_SETFCAP: Final = 31
_MOUNTS: Final = frozenset({FailurePlace.PRIVATE, plan.Root.op, plan.Bind.op, plan.Remount.op})
_AFTER_BWRAP: Final = frozenset({plan.Wrap.op, plan.Attrs.op, plan.Resize.op})
"""Operations that only the bubblewrap backend performs."""

_WEAKER: Final = {
    plan.Proc.op: "showing the container's own",
    plan.Netlink.op: "proxies alone",
    plan.Enter.op: "moving it over the caller's",
    FailurePlace.IDMAP: "running as root's own id",
    plan.Counter.op: "counters that are shared with the caller",
}
"""The replacement for a step that the host refuses, unless the session is ``strict``."""


class Cause(NamedTuple):
    """Why a step failed, and the remedy."""

    what: str
    hint: str


def bwrap_message(stderr: bytes) -> str:
    """Return bwrap's error output as one line that is safe to print."""
    text = stderr.decode("utf-8", "replace").strip().removeprefix("bwrap: ")
    return "".join(c if c.isprintable() else " " for c in text)


def explain(where: int, error: int, program: str, stderr: bytes = b"") -> Failed:
    """Return the event for a command that could not be started.

    Args:
        where: id of the FAILED message; its low byte is the operation.
        error: errno of the operation.
        program: first argument of the command.
        stderr: error output of bwrap, if bwrap failed.

    """
    op = operation(where)
    if op == plan.Wrap.op and not IS_LINUX:
        text = bwrap_message(stderr) or "the sandbox ended before it received the command"
        return Failed("spawn", f"sandbox-exec: {text}", "spawn-sandbox-exec")
    if op == plan.Wrap.op and stderr:
        return Failed("spawn", f"bwrap: {bwrap_message(stderr)}", "spawn-bwrap")
    if op == FailurePlace.EXEC and error == errno.E2BIG:
        return Failed(
            "spawn",
            "arguments and environment together are larger than the kernel accepts",
            "too-large",
            "pass large data through stdin, or in a file with put_bytes()",
        )
    name = FAILURE_NAMES.get(op, f"step {op}")
    if op == FailurePlace.EXEC:
        name = f"{name} {program!r}"
    code = f"spawn-{errno.errorcode.get(error, error)}"
    if error == errno.ESTALE:
        return Failed(
            "spawn",
            f"{name}: a file or directory that the session shows was replaced meanwhile",
            code,
            "run the command again; if this repeats, another session or program keeps changing "
            "the directories above a path that this session shows",
        )
    return Failed("spawn", f"{name}: {os.strerror(error)}", code)


_NOT_FOUND: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_NOT_EXECUTABLE: Final = frozenset(
    {
        errno.EACCES,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOEXEC,
        errno.EPERM,
        errno.ETXTBSY,
    }
)


def not_executed(where: int, error: int, program: str) -> tuple[int, str] | None:
    """Return the exit code and the line on stderr of a program that cannot be executed.

    They are those of a shell: 127 for a program that is not there, 126 for one that is no program.
    None for other failures, which are failures of the sandbox.
    """
    if operation(where) != FailurePlace.EXEC:
        return None
    if error in _NOT_FOUND:
        or_interpreter = ", or its interpreter is missing" if "/" in program else ""
        return 127, f"{program}: not found in the sandbox{or_interpreter}"
    if error == errno.ENOEXEC:
        return 126, f"{program}: not a program for this machine (a script needs a '#!' line)"
    if error in _NOT_EXECUTABLE:
        return 126, f"{program}: cannot be executed: {os.strerror(error)}"
    return None


def no_descriptors(exc: OSError) -> Failed:
    """Return the event for a run whose descriptors this process had no room for."""
    hint = "raise the limit on open files (ulimit -n)" if exc.errno == errno.EMFILE else ""
    code = f"spawn-{errno.errorcode.get(exc.errno or 0, 'unknown')}"
    return Failed("spawn", f"descriptors of the sandbox: {exc.strerror}", code, hint)


def unavailable(
    backend: str, op: int, error: int, *, strict: bool, stderr_text: str = ""
) -> BackendUnavailableError:
    """Return the error for a sandbox that could not be built.

    Args:
        backend: name of the backend.
        op: operation that failed.
        error: its errno; 0 if bwrap gave up without one.
        strict: whether the session rules out weaker replacements.
        stderr_text: error output of bwrap, as `bwrap_message` returns it.

    """
    found = cause(op, error)
    what, hint = _BWRAP_IN_GVISOR if found is _GVISOR and backend == "bubblewrap" else found
    if op == plan.Enter.op and backend == "bubblewrap":
        what += ", which bwrap needs"
        hint += ", or pass backend='userns', which has another way"
    elif strict and op in _WEAKER:
        what += f", and strict=True rules out {_WEAKER[op]}"
        hint += ", or drop strict=True"
    name = FAILURE_NAMES.get(op, f"step {op}")
    details = [f"{name}: {os.strerror(error)}"] if error else []
    details += [f"bwrap reports: {stderr_text}"] if stderr_text else []
    return BackendUnavailableError(
        f"the {backend!r} backend does not work here: {what} ({'; '.join(details)})",
        backend=backend,
        missing=(name,),
        hint=hint,
    )


def cause(op: int, error: int) -> Cause:
    """Return the cause of a failed operation on this machine."""
    if error in _EXHAUSTED:
        return _EXHAUSTED[error]
    if (
        op == FailurePlace.IDS
        and os.geteuid() == 0
        and not kernel.capabilities() >> _CAP_SETFCAP & 1
    ):
        return _NO_SETFCAP
    if kernel.is_gvisor() and error in _NOT_IN_GVISOR and not kernel.is_filtered():
        return _BWRAP_IN_GVISOR if op in _AFTER_BWRAP else _GVISOR
    if op in _AFTER_BWRAP:
        return _of_bwrap(op, error)
    if op == FailurePlace.CLONE:
        return _of_namespaces(error)
    if op == FailurePlace.IDS and _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if op == plan.Proc.op and error == errno.EPERM:
        return _MASKED_PROC
    if op in _OF_STEP:
        return _OF_STEP[op](error)
    if op in _MOUNTS and (
        error in {errno.EPERM, errno.EACCES} or (error == errno.ENOSYS and kernel.is_filtered())
    ):
        return _of_mounts()
    if error == errno.ENOSYS:
        return too_old()
    return _NOT_BUILT


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _profile() -> str:
    """Return the AppArmor profile of this process; empty if none confines it."""
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
            f"seccompProfile: Unconfined), with {_NESTED_PROFILE}, or with the SYS_ADMIN "
            "capability; where none of them is possible, backend='landlock' isolates less",
        )
    if error == errno.EINVAL:
        return Cause(
            "a kind of namespace does not exist in this kernel, or in an emulator such as "
            "qemu-user that executes this program",
            "the kernel needs CONFIG_USER_NS, PID_NS, IPC_NS, UTS_NS, NET_NS and CGROUPS; an "
            "emulated container needs an image for this machine's own architecture (Docker: "
            "--platform)",
        )
    return Cause(
        "the kernel makes no user namespaces for this process",
        "is it built with CONFIG_USER_NS, and does this process run outside a chroot?",
    )


def _of_bwrap(op: int, error: int) -> Cause:
    """Return the cause when bwrap fails, or a process that it started cannot finish the set-up.

    ``error`` is 0 if bwrap gave up by itself and the same sandbox could be built without it.
    """
    also = "" if error else "; backend='userns' works here"
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return Cause(
            "AppArmor restricts what bwrap may do in a user namespace on this host",
            "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an "
            "AppArmor profile with the 'userns' permission that keeps the capabilities of its "
            f"child processes{also}",
        )
    if op == plan.Wrap.op and error:
        return Cause(
            "bwrap does not start",
            "root starts it as an unprivileged id: every user must be allowed to execute it and to "
            "read its libraries",
        )
    if op == plan.Wrap.op:
        return Cause(
            "bwrap gave up, though the same sandbox can be built without it",
            f"try it by hand: bwrap --unshare-all --ro-bind / / true{also}",
        )
    return Cause(
        "processes started by bwrap are not allowed to finish the set-up",
        "a security profile for bwrap removes its capabilities; pass backend='userns'",
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


def _of_mediator(error: int) -> Cause:
    if error == errno.EBUSY:
        return Cause(
            "this container's seccomp profile uses notifications itself, and a process has only "
            "one listener",
            "run it with a profile without notifications",
        )
    if error in {errno.EINVAL, errno.ENOSYS}:
        return Cause(
            "the kernel, or this container's seccomp profile, has no seccomp notifications",
            "Linux 5.19 or newer is needed, with a profile that allows seccomp",
        )
    return _NOT_BUILT


def _of_root(_: int) -> Cause:
    return _NO_PIVOT if kernel.is_filtered() else _NO_ROOT


def _of_mounts() -> Cause:
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if kernel.is_filtered():
        return Cause(
            "this container's seccomp profile refuses mounts inside a user namespace",
            "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined), or with "
            f"{_NESTED_PROFILE}",
        )
    profile = _profile()
    if profile:
        return Cause(
            f"the security profile {profile!r} refuses mounts inside a user namespace",
            "run the container with apparmor=unconfined (Kubernetes: appArmorProfile: Unconfined)",
        )
    return Cause("mounts are refused inside a user namespace", "")


def too_old() -> Cause:
    """Return the cause of a system call that is not implemented."""
    if kernel.is_gvisor():
        return _GVISOR
    if kernel.is_filtered():
        return Cause(
            "this container's seccomp profile refuses a system call that sandboxes need",
            "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined), or with "
            f"{_NESTED_PROFILE}",
        )
    return Cause(f"the kernel {os.uname().release} is too old", "Linux 5.12 or newer is needed")


_NESTED_PROFILE: Final = (
    "the profile that `python -m union.sandbox._seccomp.container_profile` prints (Kubernetes: "
    "seccompProfile: Localhost)"
)
NO_ID_MAPS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
"""The kernel, or the file system, has no id-mapped mounts; EPERM: not for a container's root."""
_NO_COUNTER: Final = Cause(
    "the limits of a user namespace in /proc/sys/user cannot be set",
    "mount /proc/sys writable in this container, or run as root, where a session has an id of "
    "its own",
)
_NOT_BUILT: Final = Cause(
    "a sandbox could not be built", "please report this, with the output of sbx doctor"
)
_NO_ROOM: Final = "raise the limit on open files (ulimit -n), or close sessions that are done"
_EXHAUSTED: Final = {
    errno.EAGAIN: Cause(
        "no more processes may be started",
        "raise the limit on processes (ulimit -u, or pids.max of the control group)",
    ),
    errno.ENOMEM: Cause("there is not enough memory", "free some, or raise the limit (ulimit -v)"),
    errno.EMFILE: Cause("no file descriptor is left", _NO_ROOM),
    errno.ENFILE: Cause(
        "no file descriptor is left on this machine", "as root: sysctl fs.file-max"
    ),
    errno.ESTALE: Cause(
        "a file or directory that the session shows was replaced while the sandbox was being built",
        "try again; if this repeats, another session or program keeps changing the directories "
        "above a path that this session shows",
    ),
}
"""Errors that depend on resources or concurrent changes, not on the kind of machine."""
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
    "run it with seccomp=unconfined (Kubernetes: seccompProfile: Unconfined), or with "
    f"{_NESTED_PROFILE}",
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
    "this container runs in gVisor, and this release of it lacks what sandboxes inside it need",
    "gVisor release-20260622 or newer is needed (runsc --version); or run the container with "
    "another runtime (Kubernetes: another runtimeClassName)",
)
_BWRAP_IN_GVISOR: Final = Cause(
    "this container runs in gVisor, where bwrap does not work",
    "pass backend='userns'",
)
_NOT_IN_GVISOR: Final = frozenset(
    {0, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTDIR, errno.ENOENT}
)
"""Errors of a feature that gVisor does not have; 0: bwrap gave up. All others have other causes."""
_OF_STEP: Final[dict[int, Callable[[int], Cause]]] = {
    plan.Netlink.op: lambda _: _NO_REDIRECT,
    plan.Counter.op: lambda _: _NO_COUNTER,
    FailurePlace.IDMAP: _of_id_maps,
    plan.Enter.op: _of_root,
    plan.Mediate.op: _of_mediator,
}
