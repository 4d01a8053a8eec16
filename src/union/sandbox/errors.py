"""Every error this package raises.

::

    SandboxError                       has a stable ``code`` and, where it helps, a ``hint``
    ├── SandboxUsageError              invalid call; nothing was started (also a ValueError)
    │   ├── PolicyError                a policy is invalid, or a call would widen it
    │   ├── UnknownArgumentError       the call has no such argument (also a TypeError)
    │   └── SessionClosedError         the session is not open
    ├── BackendUnavailableError        this machine cannot provide the isolation requested
    ├── SandboxExecutionError          no real exit happened: start-up or the connection failed
    │   └── SandboxConnectionError     the server is unreachable, or the connection was lost
    ├── SandboxBusyError               a checkpoint cannot be taken while commands run
    ├── SandboxCommandError            non-zero exit with check=True, or from run_code()
    ├── SandboxCellError               a cell failed, with check=True, or in set() and get()
    └── ContextLostError               the interpreter of a context has ended

Exit codes, timeouts and out-of-memory kills are results. Only sandbox failures raise.

Errors of file calls are both a ``SandboxFileError`` and the matching builtin::

    SandboxFileError                   (OSError) any other error of the file system
    ├── SandboxPathError               (PermissionError) outside the work dir, or through a link
    ├── SandboxFileNotFoundError       (FileNotFoundError)
    ├── SandboxFileExistsError         (FileExistsError)
    ├── SandboxIsADirectoryError       (IsADirectoryError)
    ├── SandboxNotADirectoryError      (NotADirectoryError)
    ├── SandboxNotRegularError         (PermissionError) a FIFO, socket or device
    ├── SandboxFileAccessError         (PermissionError) permission denied
    └── SandboxFileTooLargeError       (OSError, EFBIG)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox._contexts.values import CellResult
    from union.sandbox._core.file_errors import (
        SandboxFileAccessError,
        SandboxFileError,
        SandboxFileExistsError,
        SandboxFileNotFoundError,
        SandboxFileTooLargeError,
        SandboxIsADirectoryError,
        SandboxNotADirectoryError,
        SandboxNotRegularError,
        SandboxPathError,
    )
    from union.sandbox._core.optional_deps import MissingExtraError
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._session.result import ExecResult

__all__ = [
    "BackendUnavailableError",
    "CommandError",
    "ContextLostError",
    "ExecutionError",
    "MissingExtraError",
    "PolicyError",
    "SandboxBusyError",
    "SandboxCellError",
    "SandboxCommandError",
    "SandboxConnectionError",
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
    "SandboxUsageError",
    "SandboxWarning",
    "SessionClosedError",
    "UnknownArgumentError",
]

_ELSEWHERE = {"MissingExtraError": "union.sandbox._core.optional_deps"}


def __getattr__(name: str) -> Any:
    # Loaded at the first use, so that importing the package stays cheap.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = _ELSEWHERE.get(name, "union.sandbox._core.file_errors")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def _rebuild(cls: type[SandboxError], args: tuple[Any, ...], state: dict[str, Any]) -> SandboxError:
    exc = cls.__new__(cls)
    exc.args = args
    exc.__dict__.update(state)
    return exc


class SandboxError(Exception):
    """Base class of all errors of this package.

    ``code`` is a stable string to branch on; ``hint`` is the remedy, or empty.
    """

    code: str = "sandbox-error"

    def __init__(self, message: str, *, code: str | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else type(self).__name__
        return f"{message}\nhint: {self.hint}" if self.hint else message

    def __reduce__(self) -> tuple[Callable[..., SandboxError], tuple[Any, ...]]:
        # Exceptions with keyword-only arguments do not unpickle by themselves.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class SandboxUsageError(SandboxError, ValueError):
    """The call is invalid; nothing was started. ``argument`` names the invalid argument."""

    code = "usage"

    def __init__(
        self, message: str, *, argument: str = "", code: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.argument = argument


class PolicyError(SandboxUsageError):
    """A policy is invalid, or a call requests more than its session allows."""

    code = "policy"


class UnknownArgumentError(SandboxUsageError, TypeError):
    """The call has no argument of this name; the hint names the nearest one."""

    code = "unknown-argument"


class SessionClosedError(SandboxUsageError):
    """The session is not open: never opened, closed, or past its ``timeout_s``."""

    code = "session-closed"


class BackendUnavailableError(SandboxError):
    """This machine cannot provide the isolation requested. There is no weaker fallback.

    ``backend`` is the backend requested, ``missing`` names what this machine lacks.
    """

    code = "backend-unavailable"

    def __init__(
        self,
        message: str,
        *,
        backend: str = "",
        missing: Sequence[str] = (),
        code: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.backend = backend
        self.missing = tuple(missing)


class SandboxExecutionError(SandboxError):
    """No real exit happened: the command was not started, or its end was not observed.

    ``stage`` is one of ``plan``, ``spawn``, ``stream``, ``transport``. ``returncode`` is -1, which
    no command returns.
    """

    code = "execution"

    def __init__(
        self,
        reason: str,
        *,
        returncode: int = -1,
        backend: str = "",
        runtime_ms: float = 0.0,
        stage: str = "spawn",
        code: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(reason, code=code, hint=hint)
        self.reason = reason
        self.returncode = returncode
        self.backend = backend
        self.runtime_ms = runtime_ms
        self.stage = stage


class SandboxConnectionError(SandboxExecutionError):
    """The server is unreachable or the connection was lost; ``sent``: the request was sent."""

    code = "connection"

    def __init__(self, reason: str, *, endpoint: str = "", sent: bool = False, **rest: Any) -> None:
        rest.setdefault("stage", "transport")
        super().__init__(reason, **rest)
        self.endpoint = endpoint
        self.sent = sent


class SandboxBusyError(SandboxError):
    """Commands or contexts run and cannot be stopped, so that no checkpoint would be exact.

    ``running`` is their number, ``files`` the paths in the work dir that they have open for
    writing, as far as this process can see them.
    """

    code = "session-busy"

    def __init__(self, running: int, files: Sequence[str] = ()) -> None:
        shown = ", ".join(files) or "none was found"
        super().__init__(
            f"{running} commands, contexts or processes run in the session; files open for "
            f"writing: {shown:.2000}",
            hint="wait for them, or close the contexts, and take the checkpoint again",
        )
        self.running = running
        self.files = tuple(files)


class SandboxCommandError(SandboxError):
    """A checked command ended with a non-zero exit code; has ``cmd`` and ``result``.

    ``network`` and ``requests`` are those of the result. If the network policy refused something,
    the hint says how to allow it.
    """

    code = "command"

    def __init__(self, cmd: str | Sequence[str], result: ExecResult, *, hint: str = "") -> None:
        shown = cmd if isinstance(cmd, str) else " ".join(cmd)
        if len(shown) > _MAX_SHOWN_CMD:
            shown = shown[:_MAX_SHOWN_CMD] + "..."
        tail = result.stderr.strip()[-_MAX_SHOWN_STDERR:]
        why = f" ({result.termination_reason})" if result.termination_reason else ""
        message = f"command ended with {result.returncode}{why}: {shown}"
        super().__init__(f"{message}\n{tail}" if tail else message, hint=hint)
        self.cmd = cmd
        self.result = result

    @property
    def network(self) -> tuple[Decision, ...]:
        """The network policy decisions for the command, in order."""
        return self.result.network

    @property
    def requests(self) -> tuple[HttpRequest, ...]:
        """The HTTP requests of the command to hosts of ``Http`` entries, in order."""
        return self.result.requests


class SandboxCellError(SandboxError):
    """A checked cell of a context raised or did not run to its end; has ``result``."""

    code = "cell"

    def __init__(self, result: CellResult) -> None:
        error = result.error
        if result.ended:
            message = f"cell {result.number} ended by {result.ended}: {result.reason}"
        elif error is None:
            message = f"cell {result.number} ended with {result.exit_code}"
        else:
            message = f"cell {result.number} raised {error.name}: {error.value[:_MAX_SHOWN_CMD]}"
        detail = error.traceback if error is not None else result.stderr
        detail = detail.strip()[-_MAX_SHOWN_STDERR:]
        super().__init__(f"{message}\n{detail}" if detail else message)
        self.result = result


class ContextLostError(SandboxError):
    """The interpreter of a context has ended, and its variables are gone."""

    code = "context-lost"


class SandboxWarning(UserWarning):
    """An argument works, but probably not as intended."""


_MAX_SHOWN_CMD = 200
_MAX_SHOWN_STDERR = 2000

# Shorter spellings.
ExecutionError = SandboxExecutionError
CommandError = SandboxCommandError
