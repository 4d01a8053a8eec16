r"""union.sandbox: untrusted Python and shell in isolated, live sessions.

>>> import asyncio
>>> from union import sandbox as sb
>>> async def main():
...     async with sb.on_device.session(backend="userns") as sbx:
...         return await sbx.run_code("print(2 + 2)")
>>> asyncio.run(main())
'4\n'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from union.sandbox import constants, errors, on_device, remote, sync
    from union.sandbox._checkpoints.values import TreeChange
    from union.sandbox._contexts.context import Context
    from union.sandbox._contexts.values import (
        CellOutput,
        CellResult,
        ContextSnapshot,
        ErrorInfo,
        FrameInfo,
        MimeBundle,
    )
    from union.sandbox._core.diagnosis import DoctorReport
    from union.sandbox._core.events import Usage
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
    from union.sandbox._core.files import FileChange, FileInfo, Skipped, Transfer
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import (
        BackendName,
        NetworkMode,
        ScriptType,
        TerminationReason,
    )
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.resources import Resources
    from union.sandbox._policy.credentials import (
        Basic,
        Bearer,
        Header,
        Query,
        ServerSecret,
        SigV4,
    )
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.http_request import HttpRequest
    from union.sandbox._policy.secret import Secret
    from union.sandbox._session.checkpoint import Checkpoint
    from union.sandbox._session.process import SandboxProcess
    from union.sandbox._session.result import ExecResult
    from union.sandbox._session.session import Session
    from union.sandbox._version import __version__ as __version__
    from union.sandbox.cluster._attach import attach
    from union.sandbox.cluster._environment import (
        DEFAULT_SANDBOX_ENV,
        DEFAULT_SANDBOX_ENV_BWRAP,
        SandboxEnvironment,
    )
    from union.sandbox.cluster._image import base_sandbox_image, image_with_sandbox
    from union.sandbox.cluster._launch import session
    from union.sandbox.cluster._session import SandboxSession
    from union.sandbox.constants import (
        CLOUD_METADATA_DENY,
        DEVNULL,
        INHERIT,
        KUBERNETES_DENY,
        PIPE,
        PYPI_HOSTS,
        STDOUT,
    )
    from union.sandbox.errors import (
        BackendUnavailableError,
        ContextLostError,
        PolicyError,
        SandboxBusyError,
        SandboxCellError,
        SandboxCommandError,
        SandboxConnectionError,
        SandboxError,
        SandboxExecutionError,
        SandboxUsageError,
        SessionClosedError,
        UnknownArgumentError,
    )
    from union.sandbox.on_device._availability import BackendStatus
    from union.sandbox.on_device._doctor import doctor

    DEFAULT_ENV = DEFAULT_SANDBOX_ENV
    DEFAULT_ENV_BWRAP = DEFAULT_SANDBOX_ENV_BWRAP
    Environment = SandboxEnvironment
    Process = SandboxProcess
    base_image = base_sandbox_image

# Names are resolved at first use, so that importing the package is cheap.
_HOMES = {
    "BackendName": "_core.literals",
    "BackendStatus": "on_device._availability",
    "BackendUnavailableError": "errors",
    "Basic": "_policy.credentials",
    "Bearer": "_policy.credentials",
    "CLOUD_METADATA_DENY": "constants",
    "CellOutput": "_contexts.values",
    "CellResult": "_contexts.values",
    "Checkpoint": "_session.checkpoint",
    "Context": "_contexts.context",
    "ContextLostError": "errors",
    "ContextSnapshot": "_contexts.values",
    "DEFAULT_ENV": "cluster._environment:DEFAULT_SANDBOX_ENV",
    "DEFAULT_ENV_BWRAP": "cluster._environment:DEFAULT_SANDBOX_ENV_BWRAP",
    "DEFAULT_SANDBOX_ENV": "cluster._environment",
    "DEFAULT_SANDBOX_ENV_BWRAP": "cluster._environment",
    "DEVNULL": "constants",
    "Decision": "_policy.decision",
    "DoctorReport": "_core.diagnosis",
    "ErrorInfo": "_contexts.values",
    "Environment": "cluster._environment:SandboxEnvironment",
    "ExecResult": "_session.result",
    "FileChange": "_core.files",
    "FileInfo": "_core.files",
    "ProcessInfo": "_core.processes",
    "FrameInfo": "_contexts.values",
    "Header": "_policy.credentials",
    "Http": "_policy.http_entries",
    "HttpRequest": "_policy.http_request",
    "INHERIT": "constants",
    "Isolation": "_core.isolation",
    "KUBERNETES_DENY": "constants",
    "MimeBundle": "_contexts.values",
    "NetworkMode": "_core.literals",
    "PIPE": "constants",
    "PYPI_HOSTS": "constants",
    "PolicyError": "errors",
    "Process": "_session.process:SandboxProcess",
    "Query": "_policy.credentials",
    "Resources": "_core.resources",
    "STDOUT": "constants",
    "SandboxBusyError": "errors",
    "SandboxCellError": "errors",
    "SandboxCommandError": "errors",
    "SandboxConnectionError": "errors",
    "SandboxEnvironment": "cluster._environment",
    "SandboxError": "errors",
    "SandboxExecutionError": "errors",
    "SandboxFileAccessError": "_core.file_errors",
    "SandboxFileError": "_core.file_errors",
    "SandboxFileExistsError": "_core.file_errors",
    "SandboxFileNotFoundError": "_core.file_errors",
    "SandboxFileTooLargeError": "_core.file_errors",
    "SandboxIsADirectoryError": "_core.file_errors",
    "SandboxNotADirectoryError": "_core.file_errors",
    "SandboxNotRegularError": "_core.file_errors",
    "SandboxPathError": "_core.file_errors",
    "SandboxProcess": "_session.process",
    "SandboxSession": "cluster._session",
    "SandboxUsageError": "errors",
    "ScriptType": "_core.literals",
    "Secret": "_policy.secret",
    "Session": "_session.session",
    "SessionClosedError": "errors",
    "ServerSecret": "_policy.credentials",
    "SigV4": "_policy.credentials",
    "Skipped": "_core.files",
    "TerminationReason": "_core.literals",
    "Transfer": "_core.files",
    "TreeChange": "_checkpoints.values",
    "UnknownArgumentError": "errors",
    "Usage": "_core.events",
    "__version__": "_version",
    "attach": "cluster._attach",
    "base_image": "cluster._image:base_sandbox_image",
    "base_sandbox_image": "cluster._image",
    "constants": "constants:",
    "doctor": "on_device._doctor",
    "errors": "errors:",
    "image_with_sandbox": "cluster._image",
    "on_device": "on_device:",
    "remote": "remote:",
    "session": "cluster._launch",
    "sync": "sync:",
}

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
    "sync",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, colon, attribute = home.partition(":")
    module = importlib.import_module(f"{__name__}.{module_name}")
    value = module if colon and not attribute else getattr(module, attribute or name)
    if callable(value) and value.__module__.startswith(__name__):
        # Tracebacks and pickles then show the public name.
        value.__module__ = __name__
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
