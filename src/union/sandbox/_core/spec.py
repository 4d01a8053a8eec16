"""Validated requests as frozen values that transports carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from union.sandbox import constants

if TYPE_CHECKING:
    from union.sandbox._core.literals import NetworkMode, Persist, Shell
    from union.sandbox._policy.rules import Entry

__all__ = ["WARM", "CallPosture", "Limits", "NetworkSpec", "RunSpec", "SessionSpec", "StreamMode"]

StreamMode = Literal["collect", "pipe", "inherit", "devnull"]
MIB = 1024 * 1024


WARM: Final = 4
"""Default number of sandboxes kept ready: enough for commands in immediate succession."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run; None means no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int = constants.DEFAULT_PROCESSES
    session_processes: int = constants.DEFAULT_SESSION_PROCESSES
    """Limit for all runs of the session together, prepared sandboxes included."""
    open_files: int = constants.DEFAULT_OPEN_FILES
    file_size_bytes: int = constants.DEFAULT_FILE_SIZE_MIB * MIB
    tmp_bytes: int = constants.DEFAULT_TMP_MIB * MIB
    shm_bytes: int = constants.DEFAULT_SHM_MIB * MIB
    gpus: int = 0
    """The number of devices shown."""
    disk_bytes: int | None = None
    """Limit on what a session keeps in its private work dir."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The network policy of one call."""

    mode: NetworkMode = "blocked"
    allow: tuple[Entry, ...] = ()
    deny: tuple[Entry, ...] = ()
    proxy_url: str | None = None
    socks_url: str | None = None
    relayed: bool = False
    """Whether ``open`` is a network namespace of the command's own, so that its network can end
    before its last process does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The validated arguments of one session."""

    backend: str
    host_work_dir: str | None = None
    work_dir_name: str | None = None
    """The path under which sandboxes see the work dir; None for its path on the host."""
    network: NetworkSpec = NetworkSpec()
    """The network of a run that does not request another."""
    network_is_ceiling: bool = False
    """Whether a mode was given, so that ``network`` is also the maximum for each call."""
    timeout_s: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    read_only_paths: tuple[str, ...] = ()
    read_write_paths: tuple[str, ...] = ()
    limits: Limits = Limits()
    strict: bool = False
    warm: int = WARM
    """The number of sandboxes of each posture to keep ready."""
    preload: tuple[str, ...] | None = ()
    """Modules that a prepared Python imports before its command arrives; None: no template."""
    persist: Persist = "workdir"
    """What stays between commands: the work dir alone, or also scratch files and processes."""
    shell: Shell | None = None
    """The shell of commands that are text; None for bash where the sandbox has it."""
    trusts_preload: bool = True
    """Whether the owner has named them, so that a template may import them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPosture:
    """Changes of one call to the files and limits of its session."""

    read_only_paths: tuple[str, ...] = ()
    read_write_paths: tuple[str, ...] = ()
    limits: Limits
    """The limits of the call: the session's, or lower ones."""


class RunSpec(NamedTuple):
    """The validated arguments of one command, with the defaults of its session.

    A named tuple, because each command creates one: a frozen dataclass takes three times as long.
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
    """Rows and columns of the command's terminal; None for no terminal."""
    max_output_bytes: int = constants.MAX_OUTPUT_BYTES
    call: CallPosture | None = None
    """None for the files and limits of the session."""
    merged: bool = False
    """Whether stderr is written to the pipe of stdout; ``stderr`` is then ``"devnull"``."""

    @property
    def cmd(self) -> str | tuple[str, ...]:
        return self.argv if self.kind == "argv" else self.text
