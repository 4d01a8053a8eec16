"""Backends by name. An unknown name is an error; there is no fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._backends.bubblewrap import Bubblewrap
from union.sandbox._backends.landlock import Landlock
from union.sandbox._backends.none import NoIsolation
from union.sandbox._backends.sandbox_exec import SandboxExec, unavailable
from union.sandbox._backends.userns import Userns
from union.sandbox._system import IS_LINUX, IS_MACOS, NAME
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from union.sandbox._backends.base import Backend
    from union.sandbox._core.literals import BackendName

__all__ = ["DEFAULT", "HOST_ROOT", "NAMES", "get"]

NAMES: Final[tuple[BackendName, ...]] = (
    "bubblewrap",
    "userns",
    "landlock",
    "sandbox-exec",
    "none",
)
HOST_ROOT: Final = frozenset({"landlock", "none"})
"""Backends whose commands see the host's own root."""
DEFAULT: Final[BackendName] = "sandbox-exec" if IS_MACOS else "bubblewrap"
_LINUX_ONLY: Final = frozenset({"bubblewrap", "userns", "landlock"})
_BACKENDS: Final[dict[str, Backend]] = {
    "bubblewrap": Bubblewrap(),
    "userns": Userns(),
    "landlock": Landlock(),
    "sandbox-exec": SandboxExec(),
    "none": NoIsolation(),
}


def get(name: str) -> Backend:
    """Return a backend that this system has.

    Raises:
        BackendUnavailableError: it belongs to another system, or does not exist.

    """
    if name == "sandbox-exec" and not IS_MACOS:
        raise unavailable(NAME)
    if name in _LINUX_ONLY and not IS_LINUX:
        raise BackendUnavailableError(
            f"the {name!r} backend does not work here: it needs Linux, and this is {NAME}",
            backend=name,
            missing=("linux",),
            hint="pass backend='sandbox-exec' on macOS, or open the session in a Linux container "
            "or virtual machine",
        )
    backend = _BACKENDS.get(name)
    if backend is None:
        raise BackendUnavailableError(
            f"the {name!r} backend is not part of this release",
            backend=name,
            missing=(name,),
            hint="pass backend='userns', which needs no extra program and no privilege",
        )
    return backend
