"""What was asked for, after validation: frozen values that transports carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from union.sandbox import constants

if TYPE_CHECKING:
    from union.sandbox._core.literals import NetworkMode
    from union.sandbox._policy.rules import Entry

__all__ = ["WARM", "CallPosture", "Limits", "NetworkSpec", "RunSpec", "SessionSpec", "StreamMode"]

StreamMode = Literal["collect", "pipe", "inherit", "devnull"]
MIB = 1024 * 1024


WARM: Final = 4
"""Sandboxes kept ready: enough for commands that follow each other without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use; None means no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int = constants.DEFAULT_PROCESSES
    session_processes: int = constants.DEFAULT_SESSION_PROCESSES
    """Of all runs of the session together, and those that wait to be used."""
    open_files: int = constants.DEFAULT_OPEN_FILES
    file_size_bytes: int = constants.DEFAULT_FILE_SIZE_MIB * MIB
    tmp_bytes: int = constants.DEFAULT_TMP_MIB * MIB
    shm_bytes: int = constants.DEFAULT_SHM_MIB * MIB
    gpus: int = 0
    """Devices that are shown; no other is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The network posture of one call."""

    mode: NetworkMode = "blocked"
    allow: tuple[Entry, ...] = ()
    deny: tuple[Entry, ...] = ()
    proxy_url: str | None = None
    socks_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """One session as the caller described it."""

    backend: str
    host_work_dir: str | None = None
    network: NetworkSpec = NetworkSpec()
    """The network of a run that asks for none."""
    network_is_ceiling: bool = False
    """Whether ``network`` is also the most that a call may ask for: a mode was given."""
    timeout_s: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    read_only_paths: tuple[str, ...] = ()
    read_write_paths: tuple[str, ...] = ()
    limits: Limits = Limits()
    strict: bool = False
    warm: int = WARM
    """How many sandboxes of each posture are kept ready."""
    preload: tuple[str, ...] = ()
    """Modules that a waiting Python has imported already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPosture:
    """What one call changes about the files and limits of its session."""

    read_only_paths: tuple[str, ...] = ()
    read_write_paths: tuple[str, ...] = ()
    limits: Limits
    """The limits of the call: the session's, or lower ones."""


class RunSpec(NamedTuple):
    """One command as the caller described it, with the session's defaults merged in.

    A tuple, because one is made for every command: that takes a third of the time.
    """

    kind: Literal["shell", "python", "argv"]
    text: str = ""
    argv: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    stdout: StreamMode = "collect"
    stderr: StreamMode = "collect"
    stdin: bytes | Literal["pipe"] | None = None
    network: NetworkSpec = NetworkSpec()
    timeout_s: float | None = None
    background: bool = False
    pty: tuple[int, int] | None = None
    """Rows and columns of the terminal that the command gets; None: no terminal."""
    max_output_bytes: int = constants.MAX_OUTPUT_BYTES
    call: CallPosture | None = None
    """None, as for most calls: the files and limits of the session."""

    @property
    def cmd(self) -> str | tuple[str, ...]:
        return self.argv if self.kind == "argv" else self.text
