"""Errors on the wire: their class and attributes, so that a client raises the same error."""

from __future__ import annotations

import re
from typing import Any, Final

from union.sandbox._core import file_errors
from union.sandbox.errors import (
    BackendUnavailableError,
    PolicyError,
    SandboxBusyError,
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
    SandboxBusyError: ("running", "files"),
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
"""The ``OSError`` attribute of each argument that has another name there."""
_MAX_TEXT: Final = 8192
_MAX_ITEMS: Final = 64
_MAX_RUNNING: Final = 2**31
_LAST_ERRNO: Final = 4095
_CODE: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")


def encode_error(error: SandboxError) -> dict[str, Any]:
    """Encode an error as plain values; an unlisted class is sent as its nearest listed base."""
    kind = next((k for k in type(error).__mro__ if k in _CARRIED), SandboxExecutionError)
    payload: dict[str, Any] = {
        "type": kind.__name__,
        "message": str(error.args[0])[:_MAX_TEXT] if error.args else "",
        "code": error.code,
        "hint": error.hint[:_MAX_TEXT],
    }
    for name in _CARRIED[kind]:
        value = getattr(error, _ELSEWHERE.get(name, name), None)
        if value is not None:
            payload[name] = list(value) if isinstance(value, tuple) else value
    return payload


def clean_text(value: object, *, max_chars: int = _MAX_TEXT) -> str:
    """Return a text of the peer, cut at ``max_chars`` and without terminal control characters."""
    text = value[:max_chars] if isinstance(value, str) else ""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def decode_error(payload: dict[str, Any]) -> SandboxError:
    """Decode the error that a server returned; malformed attributes are left out."""
    name = payload.get("type")
    kind = _CLASSES.get(name) if isinstance(name, str) else None
    message = clean_text(payload.get("message")) or "the server gave no reason"
    if kind is None:
        return SandboxExecutionError(message, stage="transport", code="server")
    if kind is SandboxBusyError:
        return _decode_busy(payload)
    carried: dict[str, Any] = {}
    for field in _CARRIED[kind]:
        value = payload.get(field)
        if field == "number":
            if isinstance(value, int) and 0 < value <= _LAST_ERRNO:
                carried[field] = value
        elif field == "missing":
            if isinstance(value, list):
                carried[field] = tuple(clean_text(item) for item in value[:_MAX_ITEMS])
        elif isinstance(value, str):
            # The name of a file is data and may contain any character.
            carried[field] = value[:_MAX_TEXT] if field == "path" else clean_text(value)
    code = payload.get("code")
    return kind(
        message,
        code=code
        if isinstance(code, str) and _CODE.fullmatch(code) and code != kind.code
        else None,
        hint=clean_text(payload.get("hint")),
        **carried,
    )


def _decode_busy(payload: dict[str, Any]) -> SandboxBusyError:
    running, files = payload.get("running"), payload.get("files")
    known = files[:_MAX_ITEMS] if isinstance(files, list) else []
    return SandboxBusyError(
        running if isinstance(running, int) and 0 < running <= _MAX_RUNNING else 1,
        tuple(path[:_MAX_TEXT] for path in known if isinstance(path, str)),
    )
