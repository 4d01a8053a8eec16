"""Every error this package raises.

::

    SandboxError                       has a stable ``code`` and, where it helps, a ``hint``
    ├── SandboxUsageError              the call is wrong; nothing was started (also a ValueError)
    │   ├── PolicyError                a policy that is invalid, or would be widened
    │   ├── UnknownArgumentError       the call has no such argument (also a TypeError)
    │   └── SessionClosedError         the session is not open: not yet, or not any more
    ├── BackendUnavailableError        this machine cannot give the isolation that was asked for
    ├── SandboxExecutionError          no real exit happened: set-up failed, or the stream died
    │   └── SandboxConnectionError     the server could not be reached, or was lost
    └── SandboxCommandError            the command ended non-zero and the caller asked to check

A non-zero exit, a time-out and running out of memory are results, not exceptions.

Errors of file calls are both a ``SandboxFileError`` and the builtin that fits::

    SandboxFileError                   (OSError) any other refusal of the file system
    ├── SandboxPathError               (PermissionError) outside the work dir, or through a link
    ├── SandboxFileNotFoundError       (FileNotFoundError)
    ├── SandboxFileExistsError         (FileExistsError)
    ├── SandboxIsADirectoryError       (IsADirectoryError)
    ├── SandboxNotADirectoryError      (NotADirectoryError)
    ├── SandboxNotRegularError         (PermissionError) a FIFO, socket or device
    ├── SandboxFileAccessError         (PermissionError) the permission bits refuse
    └── SandboxFileTooLargeError       (OSError, EFBIG)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    from union.sandbox._session.process import ExecResult

__all__ = [
    "BackendUnavailableError",
    "CommandError",
    "ExecutionError",
    "MissingExtraError",
    "PolicyError",
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
    """Root of everything raised by this package.

    ``code`` is a stable string to branch on; ``hint`` says what to do, or is empty.
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
    """The call is wrong; nothing was started. ``argument`` names the offender."""

    code = "usage"

    def __init__(
        self, message: str, *, argument: str = "", code: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.argument = argument


class PolicyError(SandboxUsageError):
    """A policy is invalid, or a call asked for more than its session may give."""

    code = "policy"


class UnknownArgumentError(SandboxUsageError, TypeError):
    """The call has no argument of this name; the hint names the nearest one."""

    code = "unknown-argument"


class SessionClosedError(SandboxUsageError):
    """The session is not open: never opened, closed, or past its ``timeout_s``."""

    code = "session-closed"


class BackendUnavailableError(SandboxError):
    """This machine cannot give the isolation that was asked for; nothing weaker was used.

    ``backend`` is the one asked for, ``missing`` names what it lacks.
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
    """No real exit happened: the command could not be started, or its end was never seen.

    ``stage`` is one of ``plan``, ``spawn``, ``stream``, ``transport``. ``returncode`` is -1, which
    no command ever ends with.
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
    """The server could not be reached or was lost; ``sent`` says whether the request went out."""

    code = "connection"

    def __init__(self, reason: str, *, endpoint: str = "", sent: bool = False, **rest: Any) -> None:
        rest.setdefault("stage", "transport")
        super().__init__(reason, **rest)
        self.endpoint = endpoint
        self.sent = sent


class SandboxCommandError(SandboxError):
    """The command ended non-zero and the caller asked to check; carries ``cmd`` and ``result``."""

    code = "command"

    def __init__(self, cmd: str | Sequence[str], result: ExecResult) -> None:
        shown = cmd if isinstance(cmd, str) else " ".join(cmd)
        if len(shown) > _SHOWN_CMD:
            shown = shown[:_SHOWN_CMD] + "..."
        tail = result.stderr.strip()[-_SHOWN_STDERR:]
        why = f" ({result.termination_reason})" if result.termination_reason else ""
        message = f"command ended with {result.returncode}{why}: {shown}"
        super().__init__(f"{message}\n{tail}" if tail else message)
        self.cmd = cmd
        self.result = result


class SandboxWarning(UserWarning):
    """Something works, but not in the way that was probably meant."""


_SHOWN_CMD = 200
_SHOWN_STDERR = 2000

# The peer's newer spellings.
ExecutionError = SandboxExecutionError
CommandError = SandboxCommandError
