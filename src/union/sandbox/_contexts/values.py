"""The outcome of a cell: output, results, an exception as data, and how the cell ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from union.sandbox._core.events import Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest

__all__ = [
    "CellEnd",
    "CellEndReason",
    "CellOutput",
    "CellResult",
    "CellState",
    "ContextSnapshot",
    "ErrorInfo",
    "FrameInfo",
    "MimeBundle",
]

CellEndReason = Literal["", "interrupt", "timeout", "died", "oom", "closed"]
"""Empty: the code ran to its end, or raised."""
CellState = Literal["kept", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """One level of the call stack of an exception."""

    file: str
    """The file; ``<cell 3>`` for code of the third cell."""
    line: int
    """The line number, from 1; 0 if it is unknown."""
    function: str
    """The name of the function; ``<module>`` at the top level of a cell."""
    text: str
    """The source line, without its indentation; empty if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An exception that ended a cell, as reported by the interpreter."""

    name: str
    """The name of its class, such as ``ZeroDivisionError``."""
    value: str
    """Its message."""
    traceback: str = ""
    """The traceback as the interpreter would print it, without frames of the driver."""
    frames: tuple[FrameInfo, ...] = ()
    """The call stack, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MimeBundle:
    """One value that a cell displayed, in one or more MIME types."""

    kind: Literal["result", "display"]
    """``result`` for the last expression of a cell, ``display`` for ``display()`` and figures."""
    data: Mapping[str, str | bytes]
    """The content by MIME type: bytes for images, text for all other types."""

    @property
    def text(self) -> str | None:
        """The content of type ``text/plain``, or None."""
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        """The content of type ``text/html``, or None."""
        return self._text("text/html")

    @property
    def png(self) -> bytes | None:
        """The content of type ``image/png``, or None."""
        found = self.data.get("image/png")
        return found if isinstance(found, bytes) else None

    @property
    def json(self) -> Any:
        """The content of type ``application/json``, parsed; None if there is none.

        Raises:
            ValueError: the content is not valid JSON.

        """
        text = self._text("application/json")
        if text is None:
            return None
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("application/json: the value is nested too deeply") from None

    def _text(self, mime: str) -> str | None:
        found = self.data.get(mime)
        return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSnapshot:
    """A saved interpreter of a context; ``Context.restore()`` returns to it, any number of times.

    It is a process of the context: it counts against the limits of the session, and ends with the
    context and with ``restart()``.
    """

    number: int
    """The number of the cell that saved it."""
    generation: int
    """The generation of the context that it belongs to."""


@dataclass(frozen=True, slots=True)
class CellOutput:
    """Output of a running cell, as it arrives."""

    stream: Literal["stdout", "stderr"]
    """The stream that the cell wrote to."""
    data: bytes
    """The bytes, as they were written."""

    @property
    def text(self) -> str:
        """The bytes as UTF-8; invalid or incomplete sequences are replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnd:
    """The end of a cell as a transport reports it."""

    ended: CellEndReason = ""
    state: CellState = "kept"
    reason: str = ""
    error: ErrorInfo | None = None
    exit_code: int | None = None
    """The exit code of a shell command; None in other languages."""
    value: bytes | None = None
    """The JSON value that ``get()`` requested."""
    usage: Usage = field(default_factory=Usage)
    dropped: int = 0
    """Displays beyond the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The outcome of one cell. An exception in the cell is data, not an exception."""

    number: int
    """The number of the cell in its context, from 1."""
    stdout: str
    """Output of the cell, decoded as UTF-8; invalid bytes are replaced."""
    stderr: str
    """Error output of the cell, decoded as UTF-8; invalid bytes are replaced."""
    results: tuple[MimeBundle, ...] = ()
    """The value of the last expression and everything displayed, in order."""
    error: ErrorInfo | None = None
    """The exception that ended the cell; None without one."""
    exit_code: int | None = None
    """The exit code of a shell command; None in other languages."""
    ended: CellEndReason = ""
    """Empty after a normal end; ``interrupt``, ``timeout``, ``died``, ``oom`` or ``closed``."""
    reason: str = ""
    """Explanation of ``ended``; empty after a normal end."""
    state: CellState = "kept"
    """``lost`` if the interpreter has ended and its variables are gone."""
    network: tuple[Decision, ...] = ()
    """The network policy decisions during this cell, in order."""
    requests: tuple[HttpRequest, ...] = ()
    """The HTTP requests to hosts of ``Http`` entries during this cell, in order."""
    usage: Usage = field(default_factory=Usage)
    """CPU time and memory, as reported by the interpreter."""
    duration_s: float = 0.0
    """Wall-clock time in seconds."""
    truncated: tuple[str, ...] = ()
    """The streams that were cut at ``max_output_bytes``; ``results`` if displays were dropped."""

    @property
    def ok(self) -> bool:
        """Whether the cell ran to its end without an exception or a non-zero exit code."""
        return self.error is None and not self.ended and not self.exit_code

    @property
    def result(self) -> MimeBundle | None:
        """The value of the last expression; None if there is none."""
        for bundle in reversed(self.results):
            if bundle.kind == "result":
                return bundle
        return None

    @property
    def text(self) -> str | None:
        """The last expression as text; None if there is none."""
        found = self.result
        return None if found is None else found.text


def parse_value(data: bytes) -> Any:
    """Return the JSON value that an interpreter sent.

    Raises:
        ValueError: it is not valid JSON.

    """
    try:
        return cast("Any", json.loads(data))
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
