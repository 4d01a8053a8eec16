"""The description of a container as a pod gets it, in the terms of the OCI runtime."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from union.sandbox._seccomp import container_profile

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
    """Who runs in the container, and what the engine grants, hides and refuses."""

    uid: int
    capabilities: tuple[str, ...] = ()
    default_profile: bool = False
    """Whether system calls are filtered as by the engines' default profile."""
    nested_profile: bool = False
    """Whether they are filtered by the profile that is documented for nested sandboxes."""
    masked_proc: bool = True
    read_only: bool = False
    """Whether the whole root is read-only, with no /tmp of its own; the home stays writable."""
    shm: str = "65536k"
    writable_cgroup: bool = False
    first_id: int = 0
    """The id of the host that is root inside: with one, the container has a user namespace with
    `ids` of them, as with `hostUsers: false`. 0: the host's own ids."""
    ids: int = 65_536
    runtime: tuple[str, ...] = ("runc",)


def make_rootfs(bundle: Path, *, uid: int, first_id: int = 0) -> None:
    """Lay out the root file system and the home, which is a volume and stays writable.

    `first_id` is the id of the host that is root inside.

    The host's system directories come in by bind mounts. A system directory that is a symbolic
    link on the host (merged /usr) is one here too.
    """
    rootfs, home = bundle / "rootfs", bundle / "home"
    rootfs.mkdir(mode=0o755)
    for name in SYSTEM_DIRECTORIES:
        source = Path(name)
        inside = rootfs / source.relative_to("/")
        if source.is_symlink():
            inside.symlink_to(source.readlink())
        elif source.is_dir():
            inside.mkdir(mode=0o755)
    (rootfs / "tmp").mkdir()
    (rootfs / HOME.relative_to("/")).mkdir(parents=True)
    home.mkdir(mode=0o755)
    # The creation modes above pass through the caller's umask; a container's root must not.
    for path in (home, rootfs, *(p for p in rootfs.rglob("*") if not p.is_symlink())):
        path.chmod(0o755)
    # Also what is mounted over it gets this mode: the runtime copies it from the image.
    (rootfs / "tmp").chmod(0o1777)
    for path in (rootfs, *rootfs.rglob("*")):
        os.lchown(path, first_id, first_id)
    os.chown(home, first_id + uid, first_id + uid)


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
        "root": {"path": "rootfs", "readonly": pod.read_only},
        "process": {
            "terminal": False,
            "user": {"uid": pod.uid, "gid": pod.uid},
            "args": list(work.argv),
            "env": [f"{key}={value}" for key, value in work.env.items()],
            "cwd": str(work.cwd),
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), granted),
            "noNewPrivileges": False,
        },
        "mounts": [
            *_kernel_mounts(pod),
            *(_bind_mount(path, path, "ro") for path in (*_system_directories(), *work.readable)),
            _bind_mount(bundle / "home", HOME, "rw"),
        ],
        "linux": {
            "cgroupsPath": work.cgroup,
            "namespaces": [{"type": kind} for kind in namespaces],
            "maskedPaths": list(MASKED_PATHS if pod.masked_proc else ()),
            "readonlyPaths": list(READONLY_PATHS if pod.masked_proc else ()),
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }
    if pod.first_id:
        namespaces.append("user")
        config["linux"]["namespaces"] = [{"type": kind} for kind in namespaces]
        ids = [{"containerID": 0, "hostID": pod.first_id, "size": pod.ids}]
        config["linux"] |= {"uidMappings": ids, "gidMappings": ids}
    if pod.default_profile:
        config["linux"]["seccomp"] = container_profile.default_profile(
            machine=platform.machine(), capabilities=pod.capabilities
        )
    elif pod.nested_profile:
        config["linux"]["seccomp"] = json.loads(container_profile.profile_text())
    (bundle / "config.json").write_text(json.dumps(config, indent=1))


def _mount(kind: str, destination: str, *options: str) -> dict[str, Any]:
    return {
        "type": kind,
        "source": kind,
        "destination": destination,
        "options": list(options),
    }


def _kernel_mounts(pod: Pod) -> list[dict[str, Any]]:
    sealed = ("nosuid", "noexec", "nodev")
    scratch = _mount("tmpfs", "/tmp", "nosuid", "nodev", "mode=1777", "size=1g")
    return [
        _mount("proc", "/proc", *sealed),
        _mount("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "gid=5"),
        _mount("mqueue", "/dev/mqueue", *sealed),
        _mount("tmpfs", "/dev/shm", *sealed, "mode=1777", f"size={pod.shm}"),
        _mount("sysfs", "/sys", *sealed, "ro"),
        _mount("cgroup", "/sys/fs/cgroup", *sealed, "rw" if pod.writable_cgroup else "ro"),
        _mount("tmpfs", "/run", "nosuid", "nodev", "mode=755", "size=65536k"),
        *([] if pod.read_only else [scratch]),
    ]


def _system_directories() -> list[Path]:
    found = [Path(name) for name in SYSTEM_DIRECTORIES]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _bind_mount(source: Path, destination: Path, mode: str) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": str(source),
        "destination": str(destination),
        "options": ["rbind", "rprivate", mode],
    }
