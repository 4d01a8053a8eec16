"""Records of contexts and their cells for the console: code, results, pictures and errors.

Everything in them was chosen by sandboxed code. Sizes are bounded, text stays text, HTML is shown
as its source, and of pictures only PNG files of a moderate size are passed on.
"""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.server._records import RunRecord

if TYPE_CHECKING:
    from union.sandbox._contexts.specs import CellSpec
    from union.sandbox._contexts.values import CellEnd, MimeBundle
    from union.sandbox._core.spec import RunSpec

__all__ = ["CellRecord", "ContextRecord"]

MAX_CODE_BYTES: Final = 16 * 1024
MAX_SHOWN: Final = 64
"""Results kept per cell."""
MAX_SHOWN_BYTES: Final = 256 * 1024
"""All kept results of a cell together."""
MAX_TEXT_BYTES: Final = 4 * 1024
MAX_PIXELS: Final = 4096
"""The limit on the width and the height of a picture."""
_TRACEBACK_BYTES: Final = 8 * 1024
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_SIZE: Final = struct.Struct(">II")
_SIZE_AT: Final = 16
_ITEM_COST: Final = 256
_PREFERRED: Final = ("text/plain", "text/markdown", "text/html", "application/json")


class ContextRecord(RunRecord):
    """One context, as the console shows it."""

    def __init__(self, spec: RunSpec, language: str) -> None:
        super().__init__(spec)
        self.kind = "context"
        self.language = language
        self.network_mode = "blocked"

    def described(self) -> dict[str, Any]:
        return {**super().described(), "language": self.language}


class CellRecord(RunRecord):
    """One cell, as the console shows it.

    Args:
        spec: the cell as a run, for its network and its beginning.
        context: the record of its context.
        number: its number in the context.
        cell: the cell.

    """

    def __init__(self, spec: RunSpec, context: ContextRecord, number: int, cell: CellSpec) -> None:
        super().__init__(spec)
        self.kind = "cell"
        self._context = context
        self._cell = number
        self._operation = cell.operation
        self._state: str | None = None
        self._error: str | None = None
        self._dropped = 0
        self._shown_bytes = 0
        if cell.operation == "run":
            self.code = _text(cell.code.decode("utf-8", "replace"), MAX_CODE_BYTES)
        else:
            self.command = cell.operation  # the values of variables are not recorded

    @property
    def held(self) -> int:
        return super().held + len(self.code) + self._shown_bytes

    def display(self, bundle: MimeBundle) -> None:
        """Record a displayed value."""
        item = _item(bundle)
        size = sum(len(value) for value in item.values() if isinstance(value, str)) + _ITEM_COST
        if len(self.shown) >= MAX_SHOWN or self._shown_bytes + size > MAX_SHOWN_BYTES:
            self._dropped += 1
            return
        self._shown_bytes += size
        self._show(item)

    def cell_ended(self, end: CellEnd) -> None:
        """Record how the cell ended."""
        self._state = end.state
        if self._dropped:
            self._show({"display": "note", "text": f"{self._dropped} more results not shown"})
        if end.error is not None:
            self._error = _text(end.error.name, 100)
            trace = end.error.traceback or f"{end.error.name}: {end.error.value}"
            self._show({"display": "error", "text": _text(trace, _TRACEBACK_BYTES)})
            self._shown_bytes += min(len(trace), _TRACEBACK_BYTES)
        if end.reason:
            self._show({"display": "note", "text": _text(end.reason, 500)})

    def _show(self, item: dict[str, Any]) -> None:
        self.shown = [*self.shown, (self.tail.end, item)]
        self._wake()

    def described(self) -> dict[str, Any]:
        return {
            **super().described(),
            "context": self._context.number,
            "language": self._context.language,
            "cell": self._cell,
            "operation": self._operation,
            "state": self._state,
            "error": self._error,
        }


def _text(text: str, limit: int) -> str:
    cut = text[:limit].encode("utf-8", "replace").decode()
    return cut + "…" if len(text) > limit else cut


def _item(bundle: MimeBundle) -> dict[str, Any]:
    """Return a value for the page: a picture, or text in the simplest type that it has."""
    png = bundle.png
    if png is not None and _is_moderate(png):
        width, height = _SIZE.unpack_from(png, _SIZE_AT)
        data = base64.b64encode(png).decode("ascii")
        return {"display": "picture", "data": data, "width": width, "height": height}
    for mime in _PREFERRED:
        content = bundle.data.get(mime)
        if isinstance(content, str):
            text = _text(content, MAX_TEXT_BYTES)
            return {"display": bundle.kind, "mime": mime, "text": text}
    named = ", ".join(
        f"{_text(mime, 60)} ({len(content):,} bytes)" for mime, content in bundle.data.items()
    )
    return {"display": "note", "text": _text(named or "an empty result", MAX_TEXT_BYTES)}


def _is_moderate(png: bytes) -> bool:
    """Whether the bytes begin like a PNG file that a browser can draw without much memory."""
    if not png.startswith(_PNG) or png[12:16] != b"IHDR" or len(png) < _SIZE_AT + _SIZE.size:
        return False
    width, height = _SIZE.unpack_from(png, _SIZE_AT)
    fits = len(png) * 4 // 3 < MAX_SHOWN_BYTES
    return fits and 0 < width <= MAX_PIXELS and 0 < height <= MAX_PIXELS
