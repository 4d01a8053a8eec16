"""Results and errors of the E2B-shaped adapter, with the names and fields of the SDK."""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from union.sandbox._contexts.values import MimeBundle

__all__ = [
    "CommandExitException",
    "CommandResult",
    "EntryInfo",
    "Execution",
    "ExecutionError",
    "Logs",
    "Result",
    "TimeoutException",
    "result_of",
]


class TimeoutException(Exception):  # noqa: N818 - the name that E2B uses
    """A command or a cell was ended at its timeout."""


@dataclass
class CommandResult:
    """The end of a command."""

    stderr: str
    stdout: str
    exit_code: int
    error: str | None = None


class CommandExitException(CommandResult, Exception):  # noqa: N818 - the name that E2B uses
    """A command ended with a non-zero exit code."""

    def __str__(self) -> str:
        return f"Command exited with code {self.exit_code} and error:\n{self.stderr}"


@dataclass
class EntryInfo:
    """One file or directory."""

    name: str
    type: Literal["file", "dir"] | None
    path: str
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_time: datetime
    symlink_target: str | None = None


@dataclass
class Logs:
    """The output of a cell, in the pieces in which it arrived."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass
class ExecutionError:
    """An exception in a cell."""

    name: str
    value: str
    traceback: str


@dataclass
class Result:
    """One displayed value, by format."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    """Base64, as all binary formats."""
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    is_main_result: bool = False

    def formats(self) -> list[str]:
        """Return the names of the formats that this value has."""
        names = [n for n in self.__dataclass_fields__ if n != "is_main_result"]
        return [name for name in names if getattr(self, name) is not None]


@dataclass
class Execution:
    """The outcome of a cell."""

    results: list[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: ExecutionError | None = None
    execution_count: int | None = None

    @property
    def text(self) -> str | None:
        """The value of the last expression as text; None if there is none."""
        return next((r.text for r in self.results if r.is_main_result), None)


_FORMATS: Final = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/javascript": "javascript",
}


def result_of(bundle: MimeBundle) -> Result:
    found = Result(is_main_result=bundle.kind == "result")
    for mime, data in bundle.data.items():
        if mime == "application/json":
            with contextlib.suppress(ValueError):
                found.json = bundle.json
        elif mime in _FORMATS:
            text = data if isinstance(data, str) else base64.b64encode(data).decode()
            setattr(found, _FORMATS[mime], text)
    return found
