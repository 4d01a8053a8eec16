"""What a supervisor needs to know to start one server, and the line that tells the server."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.cluster._keys import session_name
from union.sandbox.constants import CA_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WORK_DIR", "Orders", "clean_environment"]

WORK_DIR: Final = "/tmp/sandbox-work"  # noqa: S108 - made private by the server
_KEPT: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip
"""What a server may inherit. Not the platform's credentials, nor anything else of its maker's."""


def clean_environment() -> dict[str, str]:
    """The variables that a server starts with."""
    kept = (*_KEPT, *CA_VARIABLES)
    return {name: os.environ[name] for name in kept if name in os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One server, for the one session of one run."""

    run: str
    owner_sha256: str
    guest_sha256: str
    expires: float
    """Unix time."""
    backend: str
    told: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    """The session, as the wire carries it; made when it is written, if that is not urgent."""
    bind: str
    tls: bool = False
    work_dir: str = WORK_DIR
    shown_at: str | None = None
    home: str | None = None
    log_level: str = "info"
    allow_paths: tuple[str, ...] = ()
    """Paths of the server's machine that the session uses, because its owner named them."""
    owner_lease: tuple[float, float] | None = None
    """For how many seconds the owner may be silent; for how many until it is heard at all."""
    line_fd: int | None = None
    """A descriptor that the server inherits: a socket whose other end its owner has."""

    def arguments(self) -> list[str]:
        """The command line: nothing in it is worth hiding."""
        argv = [
            sys.executable, "-m", "union.sandbox.server", "--supervised",
            "--bind", self.bind, "--backend", self.backend, "--work-dir", self.work_dir,
            "--drain", "1", "--log-level", self.log_level,
        ]  # fmt: skip
        for path in self.allow_paths:
            argv += ["--allow-path", path]
        return [*argv, "--tls-self-signed"] if self.tls else argv

    def line(self) -> bytes:
        """What goes through the server's stdin."""
        told = {
            "session": session_name(self.run),
            "told": self.told() if callable(self.told) else self.told,
            "owner_sha256": self.owner_sha256,
            "guest_sha256": self.guest_sha256,
            "expires": self.expires,
            "shown_at": self.shown_at,
            "home": self.home,
            "owner_lease": self.owner_lease,
            "line": self.line_fd,
        }
        return json.dumps(told).encode() + b"\n"
