"""Resources: the ``resources`` argument, and its translation into limits."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.spec import Limits
from union.sandbox.errors import SandboxUsageError

__all__ = ["Resources", "limits_from"]

_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)(m|[kKMGT]i?|)")
_MIN_MEMORY_BYTES: Final = 8 * 2**20
_MIN_DISK_BYTES: Final = 2**20
_MAX_QUANTITY: Final = 2**62
"""The largest value of any limit: the kernel uses signed 64-bit numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Limits of one run; None keeps the default.

    Sizes are bytes, or text with a unit: ``k``, ``M``, ``G``, ``T`` (powers of 1000) or ``Ki``,
    ``Mi``, ``Gi``, ``Ti`` (powers of 1024).

    >>> Resources(cpu=2, memory="1Gi").memory
    '1Gi'
    """

    cpu: float | str | None = None
    """Processors, such as ``1.5`` or ``"500m"``; None for no limit."""
    memory: int | str | None = None
    """Memory of all processes together, at least ``"8Mi"``; None for no limit."""
    processes: int | None = None
    """Processes and threads at the same time; None for 512."""
    session_processes: int | None = None
    """Processes and threads of all runs of the session together; None for 4096."""
    open_files: int | None = None
    """Open files of one process; None for 1024."""
    file_size: int | str | None = None
    """The largest file that can be written; None for 8 GiB."""
    tmp: int | str | None = None
    """The size of ``/tmp``; None for 512 MiB, or ``memory`` if that is less."""
    shm: int | str | None = None
    """The size of ``/dev/shm``; None for 256 MiB, or ``memory`` if that is less."""
    disk: int | str | None = None
    """What the session keeps in its work dir, at least ``"1Mi"``; None for no limit. The work dir
    is then in memory: only with a private work dir and ``userns`` or ``bubblewrap``."""
    gpu: int | None = None
    """NVIDIA devices to show; None for none. Needs the bubblewrap backend."""


if TYPE_CHECKING:
    from typing import Protocol

    class _FlyteResources(Protocol):
        """The shape of ``flyte.Resources``, whose package need not be installed."""

        @property
        def cpu(self) -> object: ...
        @property
        def memory(self) -> object: ...
        @property
        def gpu(self) -> object: ...
        @property
        def disk(self) -> object: ...
        @property
        def shm(self) -> object: ...

    AnyResources = Resources | _FlyteResources


def _usage_error(name: str, value: object, accepted: str, *, hint: str = "") -> SandboxUsageError:
    return SandboxUsageError(
        f"resources: {name} must be {accepted}, not {value!r}", argument="resources", hint=hint
    )


def _quantity(name: str, value: Any) -> float:
    """Return a Kubernetes-style quantity as a number; for a (request, limit) pair, the limit."""
    if isinstance(value, tuple | list) and len(value) == 2:
        value = value[1]
    accepted = 'a positive number or text such as "512Mi"'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _usage_error(name, value, accepted)
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip())
        if not match:
            from union.sandbox._core.suggestions import near_size

            raise _usage_error(name, value, accepted, hint=near_size(value))
        scale = 0.001 if match[2] == "m" else _UNITS[match[2]]
        number = float(match[1]) * scale
    else:
        # An int may be too large to convert to a float.
        number = float(value) if abs(value) <= _MAX_QUANTITY else math.inf
    if not math.isfinite(number) or not 0 < number <= _MAX_QUANTITY:
        raise _usage_error(name, value, accepted)
    return number


def _bytes(name: str, value: Any) -> int:
    """Return a size in bytes; 0 is rejected because the kernel takes it for no limit."""
    size = int(_quantity(name, value))
    if size < 1:
        raise _usage_error(name, value, "at least one byte")
    return size


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_QUANTITY:
        raise _usage_error(name, value, "a whole number of at least 1")
    return value


def _devices(gpu: Any) -> Any:
    """Return the number of devices of Flyte's ``gpu``: a number, ``"T4:2"``, or a device.

    The model only matters when a machine is selected, so it is ignored here.
    """
    if isinstance(gpu, str):
        _, _, number = gpu.rpartition(":")
        return int(number) if number.isdecimal() else gpu
    if hasattr(gpu, "quantity"):
        if getattr(gpu, "device_class", "GPU") != "GPU":
            raise _usage_error("gpu", gpu, "an NVIDIA GPU; other devices are not supported")
        return gpu.quantity
    return gpu


def _as_resources(value: object) -> str:
    """Return a hint that writes a mapping as `Resources`, or another remedy."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        pairs = ", ".join(f"{name}={item!r}" for name, item in value.items())
        return f"write sb.Resources({pairs:.200})"
    from union.sandbox._core.suggestions import remedy

    return remedy("resources", value)


def limits_from(resources: object, *, base: Limits | None = None) -> Limits:
    """Return the limits that ``resources`` requests: our own type, or Flyte's (known by its shape).

    Args:
        resources: a `Resources`, a ``flyte.Resources``, or None for the base.
        base: the limits of every field that is not given; None for the defaults.

    """
    limits = Limits() if base is None else base
    if resources is None:
        return limits
    if not isinstance(resources, Resources):
        if type(resources).__module__.partition(".")[0] != "flyte" or not hasattr(
            resources, "memory"
        ):
            raise SandboxUsageError(
                f"resources must be a union.sandbox.Resources or a flyte.Resources, "
                f"not {type(resources).__name__}",
                argument="resources",
                hint=_as_resources(resources),
            )
        shm = getattr(resources, "shm", None)
        resources = Resources(
            cpu=getattr(resources, "cpu", None),
            memory=getattr(resources, "memory", None),
            shm=None if shm == "auto" else shm,
            gpu=_devices(getattr(resources, "gpu", None)),
        )
    if resources.cpu is not None:
        limits = dataclasses.replace(limits, cpus=_quantity("cpu", resources.cpu))
    for name, field in (
        ("memory", "memory_bytes"),
        ("disk", "disk_bytes"),
        ("file_size", "file_size_bytes"),
        ("tmp", "tmp_bytes"),
        ("shm", "shm_bytes"),
    ):
        value = getattr(resources, name)
        if value is not None:
            limits = dataclasses.replace(limits, **{field: _bytes(name, value)})
    if resources.gpu is not None:
        is_none = resources.gpu == 0 and not isinstance(resources.gpu, bool)
        gpus = 0 if is_none else _count("gpu", resources.gpu)
        limits = dataclasses.replace(limits, gpus=gpus)
    for name in ("processes", "session_processes", "open_files"):
        value = getattr(resources, name)
        if value is not None:
            limits = dataclasses.replace(limits, **{name: _count(name, value)})
    return _consistent(_with_session(limits, resources))


def _with_session(limits: Limits, requested: Resources) -> Limits:
    """Return the limits with ``processes`` at most ``session_processes``."""
    if limits.session_processes >= limits.processes:
        return limits
    if requested.session_processes is None:
        return dataclasses.replace(limits, session_processes=limits.processes)
    if requested.processes is not None:
        raise _usage_error(
            "session_processes",
            requested.session_processes,
            f"at least processes ({requested.processes})",
        )
    return dataclasses.replace(limits, processes=limits.session_processes)


def _consistent(limits: Limits) -> Limits:
    if limits.disk_bytes is not None and limits.disk_bytes < _MIN_DISK_BYTES:
        raise _usage_error("disk", limits.disk_bytes, f"at least {_MIN_DISK_BYTES} bytes (1Mi)")
    memory = limits.memory_bytes
    if memory is None:
        return limits
    if memory < _MIN_MEMORY_BYTES:
        raise _usage_error("memory", memory, f"at least {_MIN_MEMORY_BYTES} bytes (8Mi)")
    # Files in tmpfs count as memory, so neither tmpfs may be larger than the memory limit.
    return dataclasses.replace(
        limits,
        tmp_bytes=min(limits.tmp_bytes, memory),
        shm_bytes=min(limits.shm_bytes, memory),
    )
