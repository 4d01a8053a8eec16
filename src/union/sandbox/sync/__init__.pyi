"""The whole API without await.

Written by scripts/sync_stubs.py from the asynchronous API; do not edit.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Never, Self, overload, type_check_only

from flyte import Image

from union import sandbox as _async
from union.sandbox import CLOUD_METADATA_DENY as CLOUD_METADATA_DENY
from union.sandbox import DEFAULT_ENV as DEFAULT_ENV
from union.sandbox import DEFAULT_ENV_BWRAP as DEFAULT_ENV_BWRAP
from union.sandbox import DEFAULT_SANDBOX_ENV as DEFAULT_SANDBOX_ENV
from union.sandbox import DEFAULT_SANDBOX_ENV_BWRAP as DEFAULT_SANDBOX_ENV_BWRAP
from union.sandbox import DEVNULL as DEVNULL
from union.sandbox import INHERIT as INHERIT
from union.sandbox import KUBERNETES_DENY as KUBERNETES_DENY
from union.sandbox import PIPE as PIPE
from union.sandbox import PYPI_HOSTS as PYPI_HOSTS
from union.sandbox import STDOUT as STDOUT
from union.sandbox import BackendName as BackendName
from union.sandbox import BackendStatus as BackendStatus
from union.sandbox import BackendUnavailableError as BackendUnavailableError
from union.sandbox import Basic as Basic
from union.sandbox import Bearer as Bearer
from union.sandbox import CellOutput as CellOutput
from union.sandbox import CellResult as CellResult
from union.sandbox import ContextLostError as ContextLostError
from union.sandbox import ContextSnapshot as ContextSnapshot
from union.sandbox import Decision as Decision
from union.sandbox import DoctorReport as DoctorReport
from union.sandbox import Environment as Environment
from union.sandbox import ErrorInfo as ErrorInfo
from union.sandbox import ExecResult as ExecResult
from union.sandbox import FileChange as FileChange
from union.sandbox import FileInfo as FileInfo
from union.sandbox import FrameInfo as FrameInfo
from union.sandbox import Header as Header
from union.sandbox import Http as Http
from union.sandbox import HttpRequest as HttpRequest
from union.sandbox import Isolation as Isolation
from union.sandbox import MimeBundle as MimeBundle
from union.sandbox import NetworkMode as NetworkMode
from union.sandbox import PolicyError as PolicyError
from union.sandbox import ProcessInfo as ProcessInfo
from union.sandbox import Query as Query
from union.sandbox import Resources as Resources
from union.sandbox import SandboxBusyError as SandboxBusyError
from union.sandbox import SandboxCellError as SandboxCellError
from union.sandbox import SandboxCommandError as SandboxCommandError
from union.sandbox import SandboxConnectionError as SandboxConnectionError
from union.sandbox import SandboxEnvironment as SandboxEnvironment
from union.sandbox import SandboxError as SandboxError
from union.sandbox import SandboxExecutionError as SandboxExecutionError
from union.sandbox import SandboxFileAccessError as SandboxFileAccessError
from union.sandbox import SandboxFileError as SandboxFileError
from union.sandbox import SandboxFileExistsError as SandboxFileExistsError
from union.sandbox import SandboxFileNotFoundError as SandboxFileNotFoundError
from union.sandbox import SandboxFileTooLargeError as SandboxFileTooLargeError
from union.sandbox import SandboxIsADirectoryError as SandboxIsADirectoryError
from union.sandbox import SandboxNotADirectoryError as SandboxNotADirectoryError
from union.sandbox import SandboxNotRegularError as SandboxNotRegularError
from union.sandbox import SandboxPathError as SandboxPathError
from union.sandbox import SandboxUsageError as SandboxUsageError
from union.sandbox import ScriptType as ScriptType
from union.sandbox import Secret as Secret
from union.sandbox import ServerSecret as ServerSecret
from union.sandbox import SessionClosedError as SessionClosedError
from union.sandbox import SigV4 as SigV4
from union.sandbox import Skipped as Skipped
from union.sandbox import TerminationReason as TerminationReason
from union.sandbox import Transfer as Transfer
from union.sandbox import TreeChange as TreeChange
from union.sandbox import UnknownArgumentError as UnknownArgumentError
from union.sandbox import Usage as Usage
from union.sandbox import base_image as base_image
from union.sandbox import base_sandbox_image as base_sandbox_image
from union.sandbox import constants as constants
from union.sandbox import errors as errors
from union.sandbox._checkpoints.values import LayerKind
from union.sandbox._contexts.specs import ContextLanguage, ContextRestart
from union.sandbox._core.resources import AnyResources
from union.sandbox._session.session import Paths
from union.sandbox._session.transfer import Progress
from union.sandbox.constants import Stream
from union.sandbox.sync import on_device as on_device
from union.sandbox.sync import remote as remote

__all__ = [
    "CLOUD_METADATA_DENY",
    "DEFAULT_ENV",
    "DEFAULT_ENV_BWRAP",
    "DEFAULT_SANDBOX_ENV",
    "DEFAULT_SANDBOX_ENV_BWRAP",
    "DEVNULL",
    "INHERIT",
    "KUBERNETES_DENY",
    "PIPE",
    "PYPI_HOSTS",
    "STDOUT",
    "BackendName",
    "BackendStatus",
    "BackendUnavailableError",
    "Basic",
    "Bearer",
    "CellOutput",
    "CellResult",
    "Checkpoint",
    "Context",
    "ContextLostError",
    "ContextSnapshot",
    "Decision",
    "DoctorReport",
    "Environment",
    "ErrorInfo",
    "ExecResult",
    "FileChange",
    "FileInfo",
    "FrameInfo",
    "Header",
    "Http",
    "HttpRequest",
    "Isolation",
    "MimeBundle",
    "NetworkMode",
    "PolicyError",
    "Process",
    "ProcessInfo",
    "Query",
    "Resources",
    "SandboxBusyError",
    "SandboxCellError",
    "SandboxCommandError",
    "SandboxConnectionError",
    "SandboxEnvironment",
    "SandboxError",
    "SandboxExecutionError",
    "SandboxFileAccessError",
    "SandboxFileError",
    "SandboxFileExistsError",
    "SandboxFileNotFoundError",
    "SandboxFileTooLargeError",
    "SandboxIsADirectoryError",
    "SandboxNotADirectoryError",
    "SandboxNotRegularError",
    "SandboxPathError",
    "SandboxProcess",
    "SandboxSession",
    "SandboxUsageError",
    "ScriptType",
    "Secret",
    "ServerSecret",
    "Session",
    "SessionClosedError",
    "SigV4",
    "Skipped",
    "TerminationReason",
    "Transfer",
    "TreeChange",
    "UnknownArgumentError",
    "Usage",
    "attach",
    "base_image",
    "base_sandbox_image",
    "constants",
    "doctor",
    "errors",
    "image_with_sandbox",
    "on_device",
    "remote",
    "session",
    "wrap",
]

class Checkpoint:
    """A state of a work dir: files, links, directories, their modes, and the venv."""
    @property
    def id(self) -> str:
        """Unique among the checkpoints of the session."""
        ...
    @property
    def name(self) -> str:
        """The name given to ``checkpoint()``; empty for none."""
        ...
    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        ...
    @property
    def kind(self) -> LayerKind:
        """What it is made of: ``overlay``, ``overlay-tmpfs`` or ``copy``."""
        ...
    @property
    def took_s(self) -> float:
        """Seconds that ``checkpoint()`` took."""
        ...
    @property
    def size_bytes(self) -> int | None:
        """Bytes on disk since the checkpoint before it; counted by ``Session.checkpoints()``."""
        ...
    def fork(self) -> Session:
        """Return a session of its own that begins with this state; ``with`` opens it."""
        ...
    def fork_many(self, count: int) -> list[Session]:
        """Open several forks at once and return them; the caller closes each."""
        ...
    def drop(self) -> None:
        """Remove the checkpoint. Forks of it are not affected."""
        ...
    def export(self, path: str | os.PathLike[str]) -> int:
        """Write the whole state as a tar archive and return its size in bytes."""
        ...

class Context:
    """A live interpreter: variables, imports and the working directory persist between cells."""
    def open(self) -> Self:
        """Start the interpreter and return the context."""
        ...
    def close(self) -> None:
        """End the interpreter and everything that its cells started. Closing twice is allowed."""
        ...
    @property
    def language(self) -> ContextLanguage:
        """The language of its cells."""
        ...
    @property
    def alive(self) -> bool:
        """Whether the interpreter runs."""
        ...
    @property
    def busy(self) -> bool:
        """Whether a cell runs or waits."""
        ...
    @property
    def generation(self) -> int:
        """How often the interpreter was restarted; its variables belong to one generation."""
        ...
    @property
    def isolation(self) -> Isolation:
        """The isolation layers of the interpreter."""
        ...
    @property
    def between(self) -> tuple[str, str]:
        """Output and error output written while no cell ran; the first 64 KiB of each."""
        ...
    def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
        wait: bool = True,
        max_output_bytes: int | None = None,
    ) -> CellResult:
        """Run one cell and return its output, results and end."""
        ...
    def stream(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        max_output_bytes: int | None = None,
    ) -> Iterator[CellOutput | MimeBundle | CellResult]:
        """Run one cell and yield output and displays as they arrive, and the result at the end."""
        ...
    def interrupt(self) -> None:
        """Interrupt the running cell, like Ctrl-C; its variables are kept."""
        ...
    def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of the context: its interpreter, and all that its cells started."""
        ...
    def restart(self) -> None:
        """End the interpreter and start a new one without variables; ``generation`` increases."""
        ...
    def set(self, **variables: Any) -> None:
        """Assign variables."""
        ...
    def get(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Return the value of a variable that is a JSON value, as reported by the interpreter."""
        ...
    def save(self, *, timeout_s: float | None = None) -> ContextSnapshot:
        """Save the whole interpreter: variables, modules, functions, the working directory."""
        ...
    def restore(self, snapshot: ContextSnapshot, *, timeout_s: float | None = None) -> None:
        """Return to a saved interpreter; the present one ends, the snapshot stays."""
        ...
    def discard(self, snapshot: ContextSnapshot) -> None:
        """Release a snapshot and its memory."""
        ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@type_check_only
class ProcessStdin:
    """The writing end of a command's stdin."""
    def write(self, data: bytes) -> None:
        """Queue bytes and start to send them; ``drain()`` waits until they are sent."""
        ...
    def drain(self) -> None:
        """Wait until the command's pipe has accepted everything that was written."""
        ...
    def close(self) -> None:
        """Send end-of-file after everything that was written."""
        ...

class SandboxProcess:
    """One command in a sandbox, returned by ``Session.run()``. A non-zero exit never raises."""
    @property
    def backend(self) -> str: ...
    @property
    def isolation(self) -> Isolation: ...
    @property
    def stdin(self) -> ProcessStdin | None: ...
    @property
    def pid(self) -> int | None:
        """The process id inside the sandbox; None before the command has started."""
        ...
    @property
    def returncode(self) -> int | None:
        """The exit code, 128+N if signal N ended the command; None while it runs."""
        ...
    exit_code = returncode
    @property
    def runtime_ms(self) -> float:
        """Wall-clock time in milliseconds: so far, or in total once the command has ended."""
        ...
    @property
    def termination_reason(self) -> TerminationReason:
        """Empty after an exit; else ``signal``, ``timeout``, ``oom``, ``limit`` or ``closed``."""
        ...
    @property
    def usage(self) -> Usage:
        """CPU time and memory of the command with all its children; zero while it runs."""
        ...
    @property
    def network(self) -> tuple[Decision, ...]:
        """The network policy decisions for this command, in order."""
        ...
    @property
    def requests(self) -> tuple[HttpRequest, ...]:
        """The HTTP requests of this command to hosts of ``Http`` entries, in order."""
        ...
    @property
    def truncated(self) -> tuple[str, ...]:
        """The names of the collected streams that were cut at ``max_output_bytes``."""
        ...
    def send_signal(self, signum: int) -> None:
        """Send a signal to the whole process tree. Does nothing once the command has ended."""
        ...
    def terminate(self) -> None:
        """Send SIGTERM to the whole process tree."""
        ...
    def kill(self) -> None:
        """Send SIGKILL to the whole process tree."""
        ...
    def resize(self, rows: int, cols: int) -> None:
        """Change the window size of the command's terminal. Does nothing once it has ended."""
        ...
    def wait(self) -> int:
        """Wait for the command to end and return its exit code."""
        ...
    def communicate(
        self, input: bytes | None = None, *, max_output_bytes: int | None = None
    ) -> tuple[bytes, bytes]:
        """Read both streams to their end, wait for the command, and return ``(stdout, stderr)``."""
        ...
    def communicate_text(
        self, input: bytes | None = None, *, max_output_bytes: int | None = None
    ) -> tuple[str, str]:
        """Like ``communicate()``, decoded as UTF-8; invalid bytes are replaced."""
        ...
    def iter_stdout(self) -> Iterator[bytes]:
        """Yield chunks of stdout as they arrive."""
        ...
    def iter_stderr(self) -> Iterator[bytes]:
        """Yield chunks of stderr as they arrive."""
        ...
    def iter_stdout_lines(self) -> Iterator[str]:
        """Yield decoded lines of stdout, without their line ends, as they arrive."""
        ...
    def iter_stderr_lines(self) -> Iterator[str]:
        """Yield decoded lines of stderr, without their line ends, as they arrive."""
        ...
    def result(self) -> ExecResult:
        """Return the exit code and the collected output of a command that has ended."""
        ...

@type_check_only
class SessionFiles:
    """File operations in the work dir. ``Session`` inherits them."""
    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        """Return the paths visible inside, by ``"read_only"`` and ``"read_write"``."""
        ...
    def put_bytes(
        self,
        path: str,
        data: bytes,
        *,
        mode: int = 420,
        overwrite: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Write a file atomically, creating its parent directories; return the number of bytes."""
        ...
    def get_bytes(self, path: str, *, max_bytes: int = 0) -> bytes:
        """Return the content of a regular file."""
        ...
    def list_dir(self, path: str = ".") -> tuple[FileInfo, ...]:
        """Return the entries of a directory, sorted by path. Links are described, not followed."""
        ...
    def stat(self, path: str) -> FileInfo:
        """Return the description of a file, directory or link. Links are not followed."""
        ...
    def exists(self, path: str) -> bool:
        """Return whether a path exists in the work dir. A dangling link exists."""
        ...
    def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Create a directory. Succeeds if it already exists."""
        ...
    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link (not its target) or a directory."""
        ...
    def upload(
        self,
        local: str | os.PathLike[str],
        path: str,
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy a local file to ``path``, or the content of a local directory into ``path``."""
        ...
    def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy a file to ``local``, or the content of a directory into the directory ``local``."""
        ...

@type_check_only
class MachineFiles(SessionFiles):
    """File operations of ``persist="machine"``. ``Session`` inherits them."""
    def append(self, path: str, data: bytes, *, mode: int = 420) -> int:
        """Add bytes to the end of a file, creating it with its parents; return its new size."""
        ...
    def rename(self, source: str, target: str, *, overwrite: bool = True) -> None:
        """Rename a file, link or directory."""
        ...
    def glob(self, pattern: str, *, hidden: bool = False) -> tuple[str, ...]:
        """Return the paths that match a pattern, sorted."""
        ...
    def watch(self, path: str = ".", *, recursive: bool = False) -> Iterator[FileChange]:
        """Yield the changes of a file or in a directory as they happen, until iteration ends."""
        ...
    def archive(
        self, path: str = ".", *, exclude: Sequence[str] = ..., max_bytes: int = 0
    ) -> Iterator[bytes]:
        """Yield a file or directory as a tar stream, with symbolic and hard links."""
        ...
    def extract(self, path: str, data: bytes | Iterable[bytes] | Iterable[bytes]) -> int:
        """Unpack a tar stream below a directory, with its links; return the bytes of the stream."""
        ...

@type_check_only
class SessionCheckpoints(SessionFiles):
    """Calls about checkpoints. ``Session`` inherits them."""
    @property
    def isolation(self) -> Isolation:
        """The isolation layers, verified on a live sandbox when the session was opened."""
        ...
    def checkpoint(self, name: str = "", *, contexts: bool = False) -> Checkpoint:
        """Keep the present state of the work dir, the venv included."""
        ...
    def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Return the work dir to a checkpoint. Everything since is gone."""
        ...
    def diff(
        self, checkpoint: Checkpoint | str, *, content: bool = False
    ) -> tuple[TreeChange, ...]:
        """Return the differences between a checkpoint and the work dir, sorted by path."""
        ...
    def adopt(self, other: Session) -> Checkpoint:
        """Replace the work dir by the present one of another session, such as a fork."""
        ...
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of the session, oldest first, with their sizes."""
        ...
    def import_checkpoint(self, path: str | os.PathLike[str], name: str = "") -> Checkpoint:
        """Make a checkpoint of an archive that ``Checkpoint.export()`` has written."""
        ...

@type_check_only
class SessionProcesses(SessionFiles):
    """Calls about processes. ``Session`` inherits them."""
    @property
    def shell(self) -> str:
        """The path, inside the sandbox, of the shell that runs commands given as text."""
        ...
    def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of the session, those that ended commands left behind included."""
        ...
    def stop_process(self, pid: int) -> bool:
        """End one process: SIGTERM, a short grace period, SIGKILL. Return whether it existed."""
        ...

class Session(MachineFiles, SessionProcesses, SessionCheckpoints):
    """A live sandbox: a work dir and a venv that persist over many isolated commands."""
    def open(self) -> Self:
        """Open the session and return it."""
        ...
    def close(self) -> None:
        """End every command, remove the private work dir, and return when that is done."""
        ...
    @property
    def id(self) -> str:
        """The id of the session, for ``on_device.attach()`` or ``remote.attach()``."""
        ...
    @property
    def backend(self) -> BackendName:
        """The isolation backend in use, which is the one requested."""
        ...
    @property
    def work_dir(self) -> str:
        """The path, inside the sandbox, of the directory that persists between calls."""
        ...
    def run(
        self,
        cmd: str | Sequence[str],
        *,
        stdout: bool | Stream | None = None,
        stderr: bool | Stream | None = None,
        stdin: bytes | bool | Stream | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        script_type: ScriptType = "shell",
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        background: bool = False,
        pty: bool | tuple[int, int] = False,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = ...,
        read_write_paths: Paths = ...,
        **unknown: Never,
    ) -> SandboxProcess:
        """Run one command in its own isolated process tree."""
        ...
    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        check: bool = False,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        script_type: ScriptType = "shell",
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = ...,
        read_write_paths: Paths = ...,
        **unknown: Never,
    ) -> ExecResult:
        """Run one command to its end and return its exit code and decoded output."""
        ...
    def run_code(
        self,
        code: str,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        resources: AnyResources | None = None,
        read_only_paths: Paths = ...,
        read_write_paths: Paths = ...,
        **unknown: Never,
    ) -> str:
        """Run Python source and return its stdout. Cancelling this call kills the command."""
        ...
    def context(
        self,
        language: ContextLanguage = "python",
        *,
        env: Mapping[str, str] | None = None,
        restart: ContextRestart = "never",
        interrupt_grace_s: float = 2.0,
    ) -> Context:
        """Return a context: an interpreter that keeps its variables from cell to cell."""
        ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class SandboxSession(Session):
    """A live sandbox in a run of its own, made by ``session(...)``."""
    @property
    def name(self) -> str: ...
    @property
    def created_at(self) -> datetime: ...
    @property
    def expires_at(self) -> datetime: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def ip(self) -> str | None: ...
    @property
    def url(self) -> str | None: ...
    @property
    def project(self) -> str | None: ...
    @property
    def domain(self) -> str | None: ...
    @property
    def environment(self) -> str: ...
    @property
    def sandbox_mode(self) -> str: ...
    @property
    def network_mode(self) -> str | None: ...
    @property
    def network_allowlist(self) -> list[str] | None: ...
    @property
    def network_denylist(self) -> list[str] | None: ...
    @property
    def host_work_dir(self) -> str | None: ...
    @property
    def access(self) -> str: ...
    @property
    def verifier(self) -> str: ...
    @property
    def is_owner(self) -> bool:
        """Whether this object started the run, and ends it."""
        ...

Process = SandboxProcess

def attach(name: str, *, ready_timeout: timedelta | float = ...) -> SandboxSession:
    """Find a session again by its name, and become its owner: after a crash, or elsewhere."""
    ...

def doctor() -> DoctorReport:
    """Try every backend and every layer below them on this machine."""
    ...

def image_with_sandbox(image: Image, *, extras: Sequence[str] = ...) -> Image:
    """Add this package to an image of your own: exactly the code that this process runs."""
    ...

def session(
    environment: SandboxEnvironment | str | None = None,
    *,
    name: str | None = None,
    timeout: timedelta | float = ...,
    timeout_s: float | None = None,
    project: str | None = None,
    domain: str | None = None,
    service_account: str | None = None,
    resources: object = None,
    network_mode: str | None = None,
    network_allowlist: Sequence[str] | None = None,
    network_denylist: Sequence[str] | None = None,
    network_proxy_url: str | None = None,
    network_socks_url: str | None = None,
    sandbox_mode: str | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    host_work_dir: str | None = None,
    read_only_paths: Sequence[str] = ...,
    read_write_paths: Sequence[str] = ...,
    local: bool | None = None,
    ready_timeout: timedelta | float = ...,
    owner_lease: timedelta | float | None = ...,
) -> SandboxSession:
    """Start a sandbox in a run of its own. The caller is its owner."""
    ...

@overload
def wrap(value: _async.SandboxSession) -> SandboxSession: ...
@overload
def wrap(value: _async.Session) -> Session: ...
@overload
def wrap(value: _async.Checkpoint) -> Checkpoint: ...
@overload
def wrap(value: _async.Context) -> Context: ...
@overload
def wrap(value: _async.SandboxProcess) -> SandboxProcess: ...
