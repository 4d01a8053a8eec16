"""``sandbox-exec``: the sandbox of macOS. ``_plan/seatbelt`` builds its profile.

No session runs with it yet: the launcher, which starts, limits and ends commands, is a Linux
program. This backend is therefore refused everywhere, with the reason.
"""

from __future__ import annotations

from union.sandbox._plan.seatbelt import PROGRAM
from union.sandbox.errors import BackendUnavailableError

__all__ = ["unavailable"]


def unavailable(system: str) -> BackendUnavailableError:
    """Return the error for ``system``, a value of ``platform.system()``."""
    name = "sandbox-exec"
    if system != "Darwin":
        return BackendUnavailableError(
            f"the {name!r} backend does not work here: {PROGRAM} is part of macOS, and this is "
            f"{system}",
            backend=name,
            missing=("macos",),
            hint="pass backend='userns', which needs no extra program and no privilege",
        )
    return BackendUnavailableError(
        f"the {name!r} backend does not work here: the launcher that starts, limits and ends "
        "commands is not ported to macOS yet",
        backend=name,
        missing=("launcher",),
        hint="open the session in a Linux container or virtual machine on this Mac",
    )
