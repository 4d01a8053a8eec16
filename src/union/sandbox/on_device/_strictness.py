"""What ``strict=True`` rules out: layers that are weaker here, and ids that others have too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._linux import kernel
from union.sandbox._linux.ids import id_range
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from union.sandbox._core.isolation import Isolation

__all__ = ["check"]

_NO_ID: Final = (
    "keep the work dir and the named paths on a file system with id-mapped mounts and grant "
    "SYS_ADMIN, or run as an ordinary user, or drop strict=True"
)
_NO_IDS: Final = (
    "this user namespace has too few ids: map at least 65536 of them into the container, as "
    "Kubernetes does with hostUsers: false, or run as an ordinary user, or drop strict=True"
)
_OTHER_RUNTIME: Final = (
    "run the container with another runtime than gVisor (Kubernetes: another runtimeClassName), "
    "or drop strict=True"
)
_LANDLOCK: Final = (
    "run on Linux 5.13 or newer with Landlock among its security modules "
    "(/sys/kernel/security/lsm) and a seccomp profile that allows it, or drop strict=True"
)


def check(isolation: Isolation) -> None:
    """Refuse a layer that is weaker than on Linux, and an id that others have too.

    With namespaces that is root's own id alone; without them, any id.
    """
    if isolation.root == "host" and isolation.ids != "unprivileged":
        raise BackendUnavailableError(
            f"the {isolation.backend!r} backend cannot give sandboxed code an id of its "
            "own here, and strict=True rules out an id that owns other files and processes",
            backend=isolation.backend,
            missing=("unprivileged ids",),
            hint="run as root with the capabilities that containers have by default and with a "
            "private work dir, or use backend='userns', or drop strict=True",
        )
    weaker = _weaker_layers(isolation)
    if weaker:
        raise BackendUnavailableError(
            f"the {isolation.backend!r} backend is weaker here, which strict=True rules "
            f"out: {'; '.join(weaker.values())}",
            backend=isolation.backend,
            missing=tuple(weaker),
            hint=_OTHER_RUNTIME if kernel.is_gvisor() else _LANDLOCK,
        )
    if isolation.ids == "caller" and kernel.is_root():
        raise BackendUnavailableError(
            f"the {isolation.backend!r} backend cannot give sandboxed code an id of its "
            "own here, and strict=True rules out root's own",
            backend=isolation.backend,
            missing=("unprivileged ids",),
            hint=_NO_ID if id_range() is not None else _NO_IDS,
        )


def _weaker_layers(report: Isolation) -> dict[str, str]:
    """Return the layers that gVisor or an old kernel lacks, each with its effect."""
    found = {}
    if not report.landlock_abi:
        found["landlock"] = "without Landlock, the private root is the only layer around files"
    if report.proc_net == "shared":
        found["proc_net"] = "/proc/net shows the sockets of the whole container"
    if report.read_only == "contents":
        found["read_only"] = "the mode and times of read-only files on a tmpfs can be changed"
    if "rlimit-shared" in dict(report.limits).values():
        found["processes"] = "the limit on processes counts those of all sessions"
    return found
