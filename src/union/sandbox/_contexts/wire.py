"""Contexts and cells on the wire between a client and a server.

A context is a run of the kind ``context``, and each of its cells is a run of the kind ``cell``, so
both resume after a lost connection as every run does. A cell has a third stream: its displays, each
with the offsets of the output before it, and its end. A message of that stream is a size and the
body of a driver's message (``frames``). Both sides check all that they receive. This module does no
input or output.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, get_args

from union.sandbox._contexts import frames
from union.sandbox._contexts.specs import (
    MAX_CODE_BYTES,
    CellSpec,
    ContextSpec,
    resolve_cell,
    resolve_context,
    resolve_request,
    resolve_set,
)
from union.sandbox._contexts.values import CellEnd, CellEndReason, MimeBundle
from union.sandbox._core.events import Usage
from union.sandbox._wire.errors import clean_text
from union.sandbox._wire.frames import WireError, parse_json
from union.sandbox._wire.values import Start, encode_network, encode_start_body, reject_unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._contexts.specs import ContextLanguage
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._wire.values import EntryEncoder

__all__ = [
    "ContextChange",
    "MessageReader",
    "Shown",
    "context_number",
    "decode_cell",
    "decode_change",
    "decode_context",
    "encode_cell",
    "encode_change",
    "encode_context",
    "encode_display",
    "encode_end",
]

_SIZE: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct("=I")
_MAX_OFFSET: Final = 2**63
_MAX_NUMBER: Final = 2**53
_MAX_REASON_CHARS: Final = 2048
_CONTEXT: Final = frozenset({"language", "env", "interrupt_grace_s"})
_CELL: Final = frozenset(
    {
        "context", "number", "operation", "name", "env", "network_mode", "network_allowlist",
        "timeout_s", "max_output_bytes", "streamed",
    }
)  # fmt: skip


# A context.


def encode_context(spec: ContextSpec) -> bytes:
    """Encode a context as the body of a START."""
    payload = {
        "kind": "context",
        "language": spec.language,
        "env": dict(spec.env) or None,
        "interrupt_grace_s": spec.interrupt_grace_s,
    }
    return encode_start_body(payload, b"")


def decode_context(start: Start, session: SessionSpec) -> ContextSpec:
    """Decode a context.

    Raises:
        SandboxUsageError: ``Session.context()`` would raise it for the same arguments.
        WireError: a field is malformed.

    """
    fields = start.fields
    reject_unknown(fields, _CONTEXT, "a context")
    if start.text or start.stdin:
        raise WireError("a context has neither text nor stdin")
    return resolve_context(
        session,
        fields.get("language"),
        env=fields.get("env"),
        interrupt_grace_s=fields.get("interrupt_grace_s"),
    )


class ContextChange(NamedTuple):
    """The state of a context that a server reports, or the reply to a request."""

    generation: int = 0
    alive: bool = True
    at: tuple[int, int] = (0, 0)
    """Offsets at which the output between cells of this generation begins."""
    reply: int = 0
    """The number of the request; 0 for none."""
    value: Any = None
    error: dict[str, Any] | None = None


def encode_change(change: ContextChange) -> dict[str, Any]:
    """Encode an event of a context."""
    return {"context": change._asdict()}


def decode_change(fields: dict[str, Any]) -> ContextChange:
    """Decode an event of a context.

    Raises:
        WireError: a field is malformed.

    """
    at = fields.get("at")
    if not isinstance(at, list) or len(at) != 2:
        raise WireError("at must be a list of two offsets")
    error = fields.get("error")
    if error is not None and not isinstance(error, dict):
        raise WireError("error must be an object")
    alive = fields.get("alive")
    if not isinstance(alive, bool):
        raise WireError("alive must be a boolean")
    return ContextChange(
        _whole(fields, "generation"),
        alive,
        (_offset(at[0]), _offset(at[1])),
        _whole(fields, "reply"),
        fields.get("value"),
        error,
    )


def _whole(fields: dict[str, Any], name: str) -> int:
    return _offset(fields.get(name), name)


def _offset(value: object, name: str = "offset") -> int:
    if type(value) is not int or not 0 <= value < _MAX_OFFSET:
        raise WireError(f"{name} must be a whole number")
    return value


# A cell.


def encode_cell(
    spec: CellSpec,
    session: SessionSpec,
    entries: EntryEncoder | None = None,
    *,
    context: int,
    number: int,
) -> bytes:
    """Encode a cell of a context as the body of a START."""
    payload: dict[str, Any] = {
        "kind": "cell",
        "context": context,
        "number": number,
        "operation": spec.operation,
        "name": spec.name or None,
        "env": dict(spec.env) or None,
        "timeout_s": spec.timeout_s,
        "max_output_bytes": spec.max_output_bytes,
        "streamed": spec.is_streamed or None,
    }
    if spec.operation == "run" and spec.network != session.network:
        payload |= encode_network(spec.network, entries)
    return encode_start_body(payload, spec.code)


def context_number(start: Start) -> int:
    """Return the number of the context that a cell names."""
    return _whole(start.fields, "context")


def decode_cell(
    start: Start, session: SessionSpec, language: ContextLanguage
) -> tuple[int, CellSpec]:
    """Decode a cell; return its number in the context too.

    Raises:
        SandboxUsageError: a method of ``Context`` would raise it for the same arguments.
        WireError: a field is malformed.

    """
    fields = dict(start.fields)
    reject_unknown(fields, _CELL, "a cell")
    if start.stdin:
        raise WireError("a cell has no stdin")
    del fields["context"]
    number = _whole(fields, "number")
    del fields["number"]
    if not 0 < number < _MAX_NUMBER:
        raise WireError(f"the number of a cell must be 1 to {_MAX_NUMBER - 1}")
    operation = fields.pop("operation", "run")
    is_streamed = fields.pop("streamed", False)
    if not isinstance(is_streamed, bool):
        raise WireError("streamed must be a boolean")
    name = fields.pop("name", "")
    if operation == "run":
        if name:
            raise WireError("a cell has no name")
        spec = resolve_cell(session, language, start.text, **fields)
        return number, spec._replace(is_streamed=is_streamed)
    timeout_s = fields.pop("timeout_s", None)
    if fields.keys() - {"max_output_bytes"}:
        raise WireError(f"operation {operation!r:.40} has neither env nor network")
    if operation == "set":
        code = start.text.encode("utf-8", "surrogateescape")
        return number, resolve_set(language, parse_json(code, max_bytes=MAX_CODE_BYTES))
    if start.text:
        raise WireError(f"operation {operation!r:.40} has no text")
    return number, resolve_request(operation, name, language, timeout_s=timeout_s)


# Messages of a cell.


class Shown(NamedTuple):
    """A displayed value, and how much of each stream was written before it."""

    bundle: MimeBundle
    at: tuple[int, int]
    size: int


def encode_display(bundle: MimeBundle, at: tuple[int, int]) -> bytes:
    """Encode a displayed value as a message of a cell."""
    parts, contents = [], []
    for mime, content in bundle.data.items():
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        parts.append({"mime": mime, "size": len(raw), "raw": isinstance(content, bytes)})
        contents.append(raw)
    head = {
        "t": "display", "n": 1, "result": bundle.kind == "result", "parts": parts, "at": list(at),
    }  # fmt: skip
    return _message(head, b"".join(contents))


def encode_end(end: CellEnd) -> bytes:
    """Encode the end of a cell as its last message."""
    usage = end.usage
    head = {
        "t": "done",
        "n": 1,
        "error": None if end.error is None else dataclasses.asdict(end.error),
        "user_s": usage.cpu_user_s,
        "system_s": usage.cpu_system_s,
        "rss": usage.max_rss_bytes,
        "dropped": end.dropped,
        "value": end.value is not None,
        "ended": end.ended,
        "state": end.state,
        "reason": end.reason[:_MAX_REASON_CHARS],
        "exit_code": end.exit_code,
        "peak": usage.peak_memory_bytes,
    }
    return _message(head, end.value or b"")


def _message(head: dict[str, Any], raw: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    size = _LENGTH.size + len(text) + len(raw)
    return b"".join((_SIZE.pack(size), _LENGTH.pack(len(text)), text, raw))


class MessageReader:
    """Assemble the messages of one cell; holds at most one that is not complete.

    Everything is checked again: the server need not be honest.
    """

    def __init__(self) -> None:
        self._parts = bytearray()
        self._displays = 0
        self._bytes = 0
        self._is_over = False

    def feed(self, data: bytes | memoryview) -> Iterator[Shown | CellEnd]:
        """Yield the messages that these bytes complete.

        Raises:
            WireError: a message is malformed, too large, or follows the end.

        """
        self._parts += data
        while len(self._parts) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._parts)
            if size > frames.MAX_MESSAGE_BYTES:
                limit = frames.MAX_MESSAGE_BYTES
                raise WireError(f"a message of {size} bytes, the limit is {limit}")
            end = _SIZE.size + size
            if len(self._parts) < end:
                return
            body = bytes(self._parts[_SIZE.size : end])
            del self._parts[:end]
            yield self._decode(body)

    def _decode(self, body: bytes) -> Shown | CellEnd:
        if self._is_over:
            raise WireError("a message after the end of a cell")
        try:
            event, fields = frames.decode_with_head(body)
        except frames.FrameError as exc:
            raise WireError(f"malformed message of a cell: {exc}") from exc
        if isinstance(event, frames.Display):
            return self._shown(event, fields)
        if isinstance(event, frames.Done):
            self._is_over = True
            return _end(event, fields)
        raise WireError("a message of a cell is a display or its end")

    def _shown(self, event: frames.Display, fields: dict[str, Any]) -> Shown:
        self._displays += 1
        self._bytes += event.size
        if self._displays > frames.MAX_DISPLAYS or self._bytes > frames.MAX_RESULT_BYTES:
            raise WireError(f"{self._displays} displays of {self._bytes} bytes for one cell")
        at = fields.get("at")
        if not isinstance(at, list) or len(at) != 2:
            raise WireError("at must be a list of two offsets")
        return Shown(event.bundle, (_offset(at[0]), _offset(at[1])), event.size)


def _end(event: frames.Done, fields: dict[str, Any]) -> CellEnd:
    ended, state, reason = (fields.get(name) for name in ("ended", "state", "reason"))
    exit_code, peak = fields.get("exit_code"), fields.get("peak")
    if ended not in get_args(CellEndReason):
        raise WireError(f"ended must be a known reason, got {ended!r:.100}")
    if state not in {"kept", "lost"} or (ended in {"died", "oom", "closed"} and state == "kept"):
        raise WireError(f"state {state!r:.40} does not agree with the end {ended!r}")
    if exit_code is not None and (type(exit_code) is not int or not 0 <= exit_code <= 255):
        raise WireError("exit_code must be a whole number from 0 to 255")
    return CellEnd(
        ended=cast("CellEndReason", ended),
        state=state,
        reason=clean_text(reason),
        error=event.error,
        exit_code=exit_code,
        value=event.value,
        usage=Usage(
            cpu_user_s=event.usage.cpu_user_s,
            cpu_system_s=event.usage.cpu_system_s,
            max_rss_bytes=event.usage.max_rss_bytes,
            peak_memory_bytes=None if peak is None else _offset(peak, "peak"),
        ),
        dropped=event.dropped,
    )
