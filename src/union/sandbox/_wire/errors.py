"""Errors on the wire: which class, and what it carries; a client raises the same one again."""

from __future__ import annotations

import re
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

__all__ = ["clean_text", "decode_error", "encode_error"]

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
_MOST_ITEMS: Final = 64
_LAST_ERRNO: Final = 4095
_CODE: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")


def encode_error(error: SandboxError) -> dict[str, Any]:
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


def clean_text(value: object, *, most: int = _MOST_TEXT) -> str:
    """A text of the other side: cut at ``most``, and without what a terminal would obey."""
    text = value[:most] if isinstance(value, str) else ""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def decode_error(told: dict[str, Any]) -> SandboxError:
    """The error that a server returned. A malformed one is an error of the server, and raises."""
    name = told.get("type")
    kind = _CLASSES.get(name) if isinstance(name, str) else None
    message = clean_text(told.get("message")) or "the server gave no reason"
    if kind is None:
        return SandboxExecutionError(message, stage="transport", code="server")
    carried: dict[str, Any] = {}
    for field in _CARRIED[kind]:
        value = told.get(field)
        if field == "number":
            if isinstance(value, int) and 0 < value <= _LAST_ERRNO:
                carried[field] = value
        elif field == "missing":
            if isinstance(value, list):
                carried[field] = tuple(clean_text(item) for item in value[:_MOST_ITEMS])
        elif isinstance(value, str):
            # The name of a file is data, and may hold anything.
            carried[field] = value[:_MOST_TEXT] if field == "path" else clean_text(value)
    code = told.get("code")
    return kind(
        message,
        code=code
        if isinstance(code, str) and _CODE.fullmatch(code) and code != kind.code
        else None,
        hint=clean_text(told.get("hint")),
        **carried,
    )
