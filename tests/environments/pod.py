"""The description of a container as an ordinary pod gets it, in the terms of the OCI runtime."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What container engines hide by default. Any one of these mounts over /proc is enough for the
# kernel to refuse a fresh procfs in a nested user namespace, the fact these places exist to test.
MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
# What engines grant to a container that asks for nothing and drops nothing.
DEFAULT_CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
HOME = Path("/home/user")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Who runs in the container, and with which capabilities."""

    uid: int
    capabilities: tuple[str, ...] = ()


def make_rootfs(rootfs: Path, *, uid: int) -> None:
    """Lay out the root file system: the host's system directories come in by bind mounts.

    A system directory that is a symbolic link on the host (merged /usr) is one here too.
    """
    rootfs.mkdir(mode=0o755)
    for name in SYSTEM_DIRECTORIES:
        source = Path(name)
        inside = rootfs / source.relative_to("/")
        if source.is_symlink():
            inside.symlink_to(source.readlink())
        elif source.is_dir():
            inside.mkdir(mode=0o755)
    home = rootfs / HOME.relative_to("/")
    home.parent.mkdir(mode=0o755)
    home.mkdir(mode=0o755)
    # The creation modes above pass through the caller's umask; a container's root must not.
    for path in (rootfs, *(p for p in rootfs.rglob("*") if not p.is_symlink())):
        path.chmod(0o755)
    os.chown(home, uid, uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one container runs and sees.

    `cgroup` is relative to the caller's own control group. Relative matters: an absolute path would
    lift the container out of limits that hold the caller.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    readable: Sequence[Path]
    cgroup: str


def write_config(bundle: Path, *, pod: Pod, work: Workload) -> None:
    """Write the bundle's `config.json`."""
    granted = list(pod.capabilities)
    namespaces = ["pid", "mount", "ipc", "uts", "network"]
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        namespaces.append("cgroup")  # engines do this on cgroup v2 and not on v1
    config: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "hostname": "pod",
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": pod.uid, "gid": pod.uid},
            "args": list(work.argv),
            "env": [f"{key}={value}" for key, value in work.env.items()],
            "cwd": str(work.cwd),
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), granted),
            "noNewPrivileges": False,
        },
        "mounts": [*_kernel_mounts(), *_bind_mounts(work.readable)],
        "linux": {
            "cgroupsPath": work.cgroup,
            "namespaces": [{"type": kind} for kind in namespaces],
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READONLY_PATHS),
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }
    (bundle / "config.json").write_text(json.dumps(config, indent=1))


def _mount(kind: str, destination: str, *options: str) -> dict[str, Any]:
    return {
        "type": kind,
        "source": kind,
        "destination": destination,
        "options": list(options),
    }


def _kernel_mounts() -> list[dict[str, Any]]:
    sealed = ("nosuid", "noexec", "nodev")
    return [
        _mount("proc", "/proc", *sealed),
        _mount("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "gid=5"),
        _mount("mqueue", "/dev/mqueue", *sealed),
        _mount("tmpfs", "/dev/shm", *sealed, "mode=1777", "size=65536k"),
        _mount("sysfs", "/sys", *sealed, "ro"),
        _mount("cgroup", "/sys/fs/cgroup", *sealed, "ro"),
        _mount("tmpfs", "/run", "nosuid", "nodev", "mode=755", "size=65536k"),
        _mount("tmpfs", "/tmp", "nosuid", "nodev", "mode=1777", "size=1g"),
    ]


def _bind_mounts(readable: Sequence[Path]) -> list[dict[str, Any]]:
    system = [Path(name) for name in SYSTEM_DIRECTORIES]
    sources = [path for path in system if path.is_dir() and not path.is_symlink()]
    return [
        {
            "type": "bind",
            "source": str(path),
            "destination": str(path),
            "options": ["rbind", "rprivate", "ro"],
        }
        for path in (*sources, *readable)
    ]
