"""NVIDIA devices of this host, and the driver's libraries: found, never assumed.

The devices are nodes below ``/dev``. The libraries belong to the driver in the kernel and so come
from the host, whatever its version: they are where the loader's cache says, or in a directory that
drivers are installed to or that ``LD_LIBRARY_PATH`` names. What lies in the system directories is
visible already; anything else is shown file by file.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.host import is_system
from union.sandbox._plan.rootfs import Shown
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Gpus", "devices", "find"]

_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Nodes that stand for no device, and that every program needs."""
_LIBRARIES: Final = re.compile(
    r"lib(cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[\w-]+)\.so(\.[\d.]+)?"
)
_MAIN: Final = "libcuda.so.1"
_DIRECTORIES: Final = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/*-linux-gnu/nvidia/current",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/opt/nvidia/lib64",
    "/run/opengl-driver/lib",
)
_CACHE_MAGIC: Final = b"glibc-ld.so.cache1.1"
_CACHE_HEAD: Final = struct.Struct("=20sII20x")
_CACHE_ENTRY: Final = struct.Struct("=iIIIQ")
_BACKEND: Final = "bubblewrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The parts of the host's GPUs that a sandbox sees."""

    nodes: tuple[Shown, ...] = ()
    libraries: tuple[Shown, ...] = ()
    """Those that are not in a system directory."""
    library_path: tuple[str, ...] = ()
    """Directories the loader does not know by itself."""


def devices(*, root: str = "/") -> tuple[str, ...]:
    """The nodes of devices, by number; ``root`` is where the host's files are."""
    found = glob.glob(os.path.join(root, "dev/nvidia[0-9]*"))
    numbered = [p for p in found if re.fullmatch(r"nvidia\d+", os.path.basename(p))]
    return tuple(sorted(filter(_is_node, numbered), key=lambda p: int(p.rpartition("nvidia")[2])))


def find(count: int, *, for_everybody: bool, environ: Mapping[str, str], root: str = "/") -> Gpus:
    """The first ``count`` devices, and the driver's libraries. Raises when they are not there.

    ``for_everybody``: the sandbox has an id that owns nothing, so the nodes must be open to all.
    """
    there = devices(root=root)
    if len(there) < count:
        raise _lacking(count, there, root)
    control = [os.path.join(root, "dev", name) for name in _CONTROL]
    nodes = [*there[:count], *filter(_is_node, control)]
    for node in nodes:
        _require_access(node, for_everybody=for_everybody)
    known = _cached(root)
    places = dict.fromkeys((*map(os.path.dirname, known), *_directories(root, environ)))
    libraries = [path for place in places for path in _in(place)]
    mains = [path for path in libraries if os.path.basename(path) == _MAIN]
    if not mains:
        raise BackendUnavailableError(
            f"resources: there are NVIDIA devices, but the driver's library {_MAIN} was not found",
            backend=_BACKEND,
            missing=(_MAIN,),
            hint="install the driver's libraries (Debian: libcuda1), let the container runtime "
            "bring them in (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or name their directory "
            "in LD_LIBRARY_PATH",
        )
    # The loader's own order: what it knows comes first.
    place = os.path.dirname(next((path for path in mains if path in known), mains[0]))
    inside = _inside(place, root)
    return Gpus(
        nodes=tuple(_shown(path, root) for path in nodes),
        libraries=() if is_system(inside) else tuple(_shown(path, root) for path in _in(place)),
        library_path=() if any(os.path.dirname(path) == place for path in known) else (inside,),
    )


def _inside(path: str, root: str) -> str:
    return "/" + os.path.relpath(path, root)


def _shown(path: str, root: str) -> Shown:
    return Shown(source=os.path.realpath(path), path=_inside(path, root), is_dir=False)


def _is_node(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def _lacking(count: int, there: tuple[str, ...], root: str) -> BackendUnavailableError:
    if there:
        names = ", ".join(_inside(path, root) for path in there)
        what = f"resources: gpu={count} asks for more NVIDIA devices than there are ({names})"
    else:
        what = "resources: a GPU is asked for, and this host has no NVIDIA device (/dev/nvidia0)"
    return BackendUnavailableError(
        what,
        backend=_BACKEND,
        missing=("gpu",),
        hint="install the NVIDIA driver and load it (nvidia-smi shows the devices); a container "
        "needs them given to it (Docker: --gpus all; Kubernetes: the resource nvidia.com/gpu)",
    )


def _require_access(node: str, *, for_everybody: bool) -> None:
    open_to_all = stat.S_IROTH | stat.S_IWOTH
    mode = os.stat(node).st_mode
    if mode & open_to_all == open_to_all if for_everybody else os.access(node, os.R_OK | os.W_OK):
        return
    whom = "the sandbox, which runs as an id of its own" if for_everybody else "this user"
    raise BackendUnavailableError(
        f"resources: {node} is closed to {whom} (mode {stat.S_IMODE(mode):04o})",
        backend=_BACKEND,
        missing=("gpu",),
        hint=f"as root: chmod a+rw {node} (kept by the driver's option NVreg_DeviceFileMode=0666)",
    )


def _directories(root: str, environ: Mapping[str, str]) -> Iterable[str]:
    named = [path for path in environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)]
    for pattern in (*named, *_DIRECTORIES):
        yield from sorted(glob.glob(os.path.join(root, pattern.lstrip("/"))))


def _in(directory: str) -> list[str]:
    """Libraries of the driver in one directory."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = [os.path.join(directory, name) for name in names if _LIBRARIES.fullmatch(name)]
    return [path for path in paths if os.path.isfile(path)]


def _cached(root: str) -> tuple[str, ...]:
    """Libraries of the driver that the loader knows, in its order; none if there is no cache."""
    try:
        data = Path(root, "etc/ld.so.cache").read_bytes()
    except OSError:
        return ()
    # An older format may come first; the newer one is aligned behind it.
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + _CACHE_HEAD.size:
        return ()
    _, count, _ = _CACHE_HEAD.unpack_from(data, start)
    found = []
    for at in range(count):
        offset = start + _CACHE_HEAD.size + at * _CACHE_ENTRY.size
        if offset + _CACHE_ENTRY.size > len(data):
            break
        _, key, value, _, _ = _CACHE_ENTRY.unpack_from(data, offset)
        if _LIBRARIES.fullmatch(_text(data, start + key)):
            path = os.path.join(root, _text(data, start + value).lstrip("/"))
            if os.path.isfile(path):
                found.append(path)
    return tuple(dict.fromkeys(found))


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return data[at : max(end, at)].decode("utf-8", "surrogateescape")
