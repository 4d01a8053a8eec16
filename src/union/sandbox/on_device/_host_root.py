"""Inputs of the ``landlock`` backend, whose commands see the host's own root."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.landlock import MIN_ABI, MIN_ABI_FILTERED
from union.sandbox._linux import host, kernel
from union.sandbox._linux.pinning import identity_of
from union.sandbox._plan.rootfs import Shown
from union.sandbox.errors import BackendUnavailableError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from union.sandbox._backends.base import Identity, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["check", "check_kernel", "etc_files", "scratch_paths"]

_BACKEND: Final = "landlock"
_ETC: Final = ("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf")
"""The host's own files, where a private root has made ones. None of them holds a secret."""


def check_kernel(network: NetworkShape) -> None:
    """Raise if the kernel lacks what a session with this network needs."""
    abi = kernel.landlock_abi()
    needed, release = (MIN_ABI_FILTERED, "6.7") if network == "filtered" else (MIN_ABI, "6.2")
    if abi >= needed:
        _check_memory()
        return
    found = f"Landlock ABI {abi}" if abi else "no Landlock"
    what = "with an allow-list or a deny-list " if network == "filtered" else ""
    raise BackendUnavailableError(
        f"the {_BACKEND!r} backend does not work here: a session {what}needs Landlock ABI {needed}"
        f", and this kernel has {found}",
        backend=_BACKEND,
        missing=("landlock",),
        hint="pass backend='userns', which works in gVisor"
        if kernel.is_gvisor()
        else f"run on Linux {release} or newer with Landlock among its security modules "
        "(/sys/kernel/security/lsm), or use a runtime class with gVisor",
    )


def _check_memory() -> None:
    """Raise if the runner could not read the arguments of the calls that it performs."""
    if kernel.can_read_memory():
        return
    raise BackendUnavailableError(
        f"the {_BACKEND!r} backend does not work here: process_vm_readv is refused, with which the "
        "runner reads the arguments of a call",
        backend=_BACKEND,
        missing=("process_vm_readv",),
        hint="run the container with a seccomp profile that allows process_vm_readv, as the "
        "default profiles of containerd, Docker and CRI-O do",
    )


def etc_files() -> tuple[Shown, ...]:
    """Return the files of /etc that a private root would contain in a version of its own."""
    paths = (f"/etc/{name}" for name in _ETC)
    return tuple(host.shown(path) for path in paths if os.path.exists(path))


def scratch_paths(work: WorkDir, identity: Identity) -> list[Shown]:
    """Return the directories for scripts and for temporary files; hand them to the session's id."""
    if work.scratch is None or work.tmp_dir is None:
        raise ValueError("the session has no scratch directory")
    if kernel.is_root():
        # The id of the session reads scripts and writes temporary files; no other id does either.
        os.chown(work.scratch, 0, identity.host_gid)
        os.chmod(work.scratch, 0o750)  # noqa: S103 - its group is the session's id
        os.chown(work.tmp_dir, identity.host_uid, identity.host_gid)
    return [_own(work.scratch, writable=False), _own(work.tmp_dir, writable=True)]


def _own(path: str, *, writable: bool) -> Shown:
    found = os.stat(path, follow_symlinks=False)
    return Shown(source=path, path=path, writable=writable, identity=identity_of(found))


def check(spec: SessionSpec, shown: Iterable[Shown]) -> None:
    """Refuse what Landlock cannot enforce or a confined process cannot use.

    Raises:
        PolicyError: a read-only path lies below a writable one. Rules only add rights.
        BackendUnavailableError: devices are requested.

    """
    if spec.limits.gpus:
        raise BackendUnavailableError(
            f"the {_BACKEND!r} backend passes no device through, and resources request a GPU",
            backend=_BACKEND,
            missing=("gpu",),
            hint="use backend='userns' or 'bubblewrap' for GPUs",
        )
    items = tuple(shown)
    tops = [item for item in items if item.writable and item.is_dir]
    for item in items:
        inside = next((top for top in tops if item.source.startswith(top.source + "/")), None)
        if inside is not None and not item.writable:
            raise PolicyError(
                f"{item.path} must stay read-only and lies in {inside.path}, which the session may "
                f"write; backend={_BACKEND!r} cannot enforce that",
                argument="read_write_paths"
                if inside.path in spec.read_write_paths
                else "host_work_dir",
                hint="pass a work dir and read_write_paths that contain neither a read-only path "
                "nor the running Python, or use backend='userns'",
            )
