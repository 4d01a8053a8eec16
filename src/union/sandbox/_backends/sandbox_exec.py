"""``sandbox-exec``: macOS's own sandbox. The profile is made in ``_plan/seatbelt``.

No session runs with it yet: commands are started, limited and ended by the launcher, which is a
program for Linux. So asking for this backend is refused everywhere, with the reason.
"""

from __future__ import annotations

from union.sandbox._plan.seatbelt import PROGRAM
from union.sandbox.errors import BackendUnavailableError

__all__ = ["unavailable"]


def unavailable(system: str) -> BackendUnavailableError:
    """Why the backend cannot be had on ``system``, as ``platform.system()`` names it."""
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
