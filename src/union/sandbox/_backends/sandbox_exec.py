"""``sandbox-exec``: the sandbox of macOS. ``_plan/seatbelt`` compiles its profile.

Nothing is mounted: a command sees the host's own paths, and the kernel refuses every access that
the profile does not name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from union.sandbox._core.isolation import Isolation
from union.sandbox._plan import plan as p
from union.sandbox._plan.seatbelt import PROGRAM
from union.sandbox.errors import BackendUnavailableError

if TYPE_CHECKING:
    from union.sandbox._backends.base import Setting

__all__ = ["SandboxExec", "unavailable"]

_NAME: Final = "sandbox-exec"
_LOOPBACK: Final = {"blocked": "none", "filtered": "proxies", "open": "host"}


class SandboxExec:
    """A sandbox by profile: no namespaces, the caller's id, the host's paths."""

    name = _NAME

    def plan(self, setting: Setting) -> p.Plan:  # noqa: ARG002 - the protocol
        """Return an empty plan: the profile is passed to ``sandbox-exec``."""
        return p.Plan(steps=(), clone_flags=0)

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        """Return the report; the digest of the profile is added by the posture."""
        return Isolation(
            backend=self.name,
            ids=setting.identity.kind,
            no_new_privs=True,
            limits=limits,
            egress=setting.egress,
            processes="label",
            loopback=_LOOPBACK[setting.network],
        )


def unavailable(system: str) -> BackendUnavailableError:
    """Return the error for a system that is not macOS."""
    return BackendUnavailableError(
        f"the {_NAME!r} backend does not work here: {PROGRAM} is part of macOS, and this is "
        f"{system}",
        backend=_NAME,
        missing=("macos",),
        hint="pass backend='userns', which needs no extra program and no privilege",
    )
