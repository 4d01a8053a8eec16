"""``resources=``: the caller's wish for memory, processors and the like, turned into limits."""

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
_MAX_QUANTITY: Final = 2**62
"""Of anything: the kernel counts in 64 bits, with a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one run may use. Sizes are bytes or text such as ``"512Mi"``; None keeps the default.

    ``session_processes`` limits the processes and threads of all runs of the session together.
    ``gpu`` is a number of NVIDIA devices; it needs the bubblewrap backend.

    >>> Resources(cpu=2, memory="1Gi").memory
    '1Gi'
    """

    cpu: float | str | None = None
    memory: int | str | None = None
    processes: int | None = None
    session_processes: int | None = None
    open_files: int | None = None
    file_size: int | str | None = None
    tmp: int | str | None = None
    shm: int | str | None = None
    gpu: int | None = None


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
    """A Kubernetes-like quantity; the upper bound of a (request, limit) pair."""
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
        # A whole number may be too large to be a float.
        number = float(value) if abs(value) <= _MAX_QUANTITY else math.inf
    if not math.isfinite(number) or not 0 < number <= _MAX_QUANTITY:
        raise _usage_error(name, value, accepted)
    return number


def _bytes(name: str, value: Any) -> int:
    """A size; to the kernel, none at all would mean as much as there is."""
    size = int(_quantity(name, value))
    if size < 1:
        raise _usage_error(name, value, "at least one byte")
    return size


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_QUANTITY:
        raise _usage_error(name, value, "a whole number of at least 1")
    return value


def _devices(gpu: Any) -> Any:
    """How many devices Flyte's ``gpu`` means: a number, ``"T4:2"``, or a device with a quantity.

    The model is for whoever picks the machine; on this one there is what there is.
    """
    if isinstance(gpu, str):
        _, _, number = gpu.rpartition(":")
        return int(number) if number.isdecimal() else gpu
    if hasattr(gpu, "quantity"):
        if getattr(gpu, "device_class", "GPU") != "GPU":
            raise _usage_error("gpu", gpu, "an NVIDIA GPU; no other kind of device can be shown")
        return gpu.quantity
    return gpu


def _as_resources(value: object) -> str:
    """How a mapping is written as `Resources`, or another remedy."""
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


def _with_session(limits: Limits, asked: Resources) -> Limits:
    """One run may take all that the session has, and no more."""
    if limits.session_processes >= limits.processes:
        return limits
    if asked.session_processes is None:
        return dataclasses.replace(limits, session_processes=limits.processes)
    if asked.processes is not None:
        raise _usage_error(
            "session_processes", asked.session_processes, f"at least processes ({asked.processes})"
        )
    return dataclasses.replace(limits, processes=limits.session_processes)


def _consistent(limits: Limits) -> Limits:
    memory = limits.memory_bytes
    if memory is None:
        return limits
    if memory < _MIN_MEMORY_BYTES:
        raise _usage_error("memory", memory, f"at least {_MIN_MEMORY_BYTES} bytes (8Mi)")
    # Scratch files are memory too: none of them may be larger than what the run may use.
    return dataclasses.replace(
        limits,
        tmp_bytes=min(limits.tmp_bytes, memory),
        shm_bytes=min(limits.shm_bytes, memory),
    )
