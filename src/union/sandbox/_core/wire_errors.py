"""Errors on the wire: which class, and what it carries; a client raises the same one again."""

from __future__ import annotations

from typing import Any, Final

from union.sandbox._core import file_errors
from union.sandbox.errors import (
    BackendUnavailableError,
    PolicyError,
    SandboxConnectionError,
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)

__all__ = ["error_from", "error_to"]

_CARRIED: Final[dict[type[SandboxError], tuple[str, ...]]] = {
    SandboxUsageError: ("argument",),
    PolicyError: ("argument",),
    SessionClosedError: ("argument",),
    BackendUnavailableError: ("backend", "missing"),
    SandboxExecutionError: ("backend", "stage"),
    SandboxConnectionError: ("backend", "stage"),
    file_errors.SandboxPathError: ("argument", "path"),
    **dict.fromkeys(
        (
            file_errors.SandboxFileError,
            file_errors.SandboxFileNotFoundError,
            file_errors.SandboxFileExistsError,
            file_errors.SandboxIsADirectoryError,
            file_errors.SandboxNotADirectoryError,
            file_errors.SandboxNotRegularError,
            file_errors.SandboxFileAccessError,
            file_errors.SandboxFileTooLargeError,
        ),
        ("path", "number"),
    ),
}
_CLASSES: Final = {kind.__name__: kind for kind in _CARRIED}
_ELSEWHERE: Final = {"path": "filename", "number": "errno"}
"""What an argument of ours is called on an ``OSError``."""
_MOST_TEXT: Final = 8192


def error_to(error: SandboxError) -> dict[str, Any]:
    """An error as plain values; a class that the table lacks goes as the nearest one it has."""
    kind = next((k for k in type(error).__mro__ if k in _CARRIED), SandboxExecutionError)
    told: dict[str, Any] = {
        "type": kind.__name__,
        "message": str(error.args[0])[:_MOST_TEXT] if error.args else "",
        "code": error.code,
        "hint": error.hint[:_MOST_TEXT],
    }
    for name in _CARRIED[kind]:
        value = getattr(error, _ELSEWHERE.get(name, name), None)
        if value is not None:
            told[name] = list(value) if isinstance(value, tuple) else value
    return told


def error_from(told: dict[str, Any]) -> SandboxError:
    """The error that a server told; one that makes no sense is itself an error."""
    kind = _CLASSES.get(str(told.get("type")))
    message = str(told.get("message") or "the server gave no reason")[:_MOST_TEXT]
    if kind is None:
        return SandboxExecutionError(message, stage="transport", code="server")
    carried: dict[str, Any] = {}
    for name in _CARRIED[kind]:
        value = told.get(name)
        if name == "number" and isinstance(value, int):
            carried[name] = value
        elif name == "missing" and isinstance(value, list):
            carried[name] = tuple(str(item) for item in value)
        elif isinstance(value, str):
            carried[name] = value
    code = told.get("code")
    return kind(
        message,
        code=code if isinstance(code, str) and code != kind.code else None,
        hint=str(told.get("hint") or ""),
        **carried,
    )
