"""The process of a supervised server: its command line, its environment, its launch document."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox.constants import CA_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._wire.launch import LaunchSpec

__all__ = ["WORK_DIR", "ServerCommand", "clean_environment"]

WORK_DIR: Final = "/tmp/sandbox-work"  # noqa: S108 - made private by the server
_INHERITED: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip
"""Variables that a server inherits: not the platform's credentials, nor other settings."""


def clean_environment() -> dict[str, str]:
    """Return the variables that a server starts with."""
    inherited = (*_INHERITED, *CA_VARIABLES)
    return {name: os.environ[name] for name in inherited if name in os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The settings of one supervised server.

    Attributes:
        backend: Backend of the session.
        bind: Address to listen at, as ``--bind`` accepts it.
        expires: End of the session, in seconds of Unix time.
        make_launch_spec: Returns the launch document. It is called after the process has started,
            so that the work is done while the server starts.
        tls: Whether the server makes a certificate and serves TLS.
        work_dir: Directory that holds the work dirs.
        log_level: Lowest level that the server logs.
        allow_paths: Paths of the server's machine that the session uses, because its owner named
            them.
        pass_fds: File descriptors that the server inherits.

    """

    backend: str
    bind: str
    expires: float
    make_launch_spec: Callable[[], LaunchSpec]
    tls: bool = False
    work_dir: str = WORK_DIR
    log_level: str = "info"
    allow_paths: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()

    def arguments(self) -> list[str]:
        """Return the command line. It holds no secret."""
        argv = [
            sys.executable, "-m", "union.sandbox.server", "--supervised",
            "--bind", self.bind, "--backend", self.backend, "--work-dir", self.work_dir,
            "--drain", "1", "--log-level", self.log_level,
        ]  # fmt: skip
        for path in self.allow_paths:
            argv += ["--allow-path", path]
        return [*argv, "--tls-self-signed"] if self.tls else argv
