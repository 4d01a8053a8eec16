"""Backends by name. An unknown name is an error; there is no fallback."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Final

from union.sandbox._backends import sandbox_exec
from union.sandbox._backends.bubblewrap import Bubblewrap
from union.sandbox._backends.none import NoIsolation
from union.sandbox._backends.userns import Userns
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from union.sandbox._backends.base import Backend
    from union.sandbox._core.literals import BackendName

__all__ = ["DEFAULT", "NAMES", "get"]

NAMES: Final[tuple[BackendName, ...]] = ("bubblewrap", "userns", "sandbox-exec", "none")
DEFAULT: Final[BackendName] = "bubblewrap"
_BACKENDS: Final[dict[str, Backend]] = {
    "bubblewrap": Bubblewrap(),
    "userns": Userns(),
    "none": NoIsolation(),
}


def get(name: str) -> Backend:
    if name == "sandbox-exec":
        raise sandbox_exec.unavailable(platform.system())
    backend = _BACKENDS.get(name)
    if backend is None:
        raise BackendUnavailableError(
            f"the {name!r} backend is not part of this release",
            backend=name,
            missing=(name,),
            hint="pass backend='userns', which needs no extra program and no privilege",
        )
    return backend
