"""Checkpoints and differences between trees on the wire."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from union.sandbox._checkpoints.values import (
    MAX_CHECKPOINTS,
    ChangeAction,
    CheckpointInfo,
    LayerKind,
    TreeChange,
    check_name,
)
from union.sandbox._core.files import FileKind
from union.sandbox._wire.frames import WireError, parse_json, to_json
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "MAX_DIFF",
    "decode_changes",
    "decode_checkpoint",
    "decode_checkpoints",
    "decode_layers",
    "encode_changes",
    "encode_checkpoint",
]

MAX_DIFF: Final = 256 * 1024 * 1024
"""The most bytes of one difference."""
_MAX_CHANGES: Final = 200_000
_PIECE: Final = 256 * 1024
_MAX_PIECE: Final = 16 * 1024 * 1024
_MAX_PATH: Final = 64 * 1024
_MAX_TEXT: Final = 4 * 1024 * 1024
_MAX_NUMBER: Final = 2**63
_MAX_MODE: Final = 0o177777
_ID: Final = re.compile(r"[0-9a-f]{1,64}")
_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(TreeChange))


def encode_checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    return dataclasses.asdict(info)


def decode_layers(value: object) -> LayerKind:
    """Decode what a work dir is made of."""
    if value not in get_args(LayerKind):
        raise WireError(
            f"layers must be one of {', '.join(get_args(LayerKind))}, got {value!r:.40}"
        )
    return cast("LayerKind", value)


def decode_checkpoint(payload: object) -> CheckpointInfo:
    """Decode the description of a checkpoint."""
    if not isinstance(payload, dict):
        raise WireError(f"a checkpoint must be an object, got {type(payload).__name__}")
    found = payload.get("id")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise WireError(f"the id of a checkpoint must be hexadecimal digits, got {found!r:.80}")
    try:
        name = check_name(payload.get("name"))
    except SandboxUsageError as exc:
        raise WireError(str(exc)) from exc
    size = payload.get("size_bytes")
    return CheckpointInfo(
        id=found,
        name=name,
        created=_seconds(payload.get("created"), "created"),
        kind=decode_layers(payload.get("kind")),
        took_s=_seconds(payload.get("took_s"), "took_s"),
        size_bytes=None if size is None else _whole(size, "size_bytes", _MAX_NUMBER),
    )


def decode_checkpoints(payload: dict[str, Any]) -> tuple[CheckpointInfo, ...]:
    found = payload.get("checkpoints")
    if not isinstance(found, list) or len(found) > MAX_CHECKPOINTS:
        raise WireError(f"checkpoints must be a list of at most {MAX_CHECKPOINTS}")
    return tuple(map(decode_checkpoint, found))


def encode_changes(changes: Iterable[TreeChange]) -> Iterator[bytes]:
    """Yield a difference in pieces of a limited size, each a JSON object."""
    part: list[dict[str, Any]] = []
    size = 0
    for change in changes:
        part.append({name: value for name, value in _items(change) if value is not None})
        size += 200 + len(change.path) + len(change.text or "")
        if size >= _PIECE:
            yield to_json({"changes": part})
            part, size = [], 0
    if part:
        yield to_json({"changes": part})


def _items(change: TreeChange) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(change, name)) for name in sorted(_FIELDS))


def decode_changes(piece: bytes, *, already: int) -> list[TreeChange]:
    """Decode one piece of a difference, of which ``already`` changes were received."""
    found = parse_json(piece, max_bytes=_MAX_PIECE).get("changes")
    if not isinstance(found, list) or len(found) + already > _MAX_CHANGES:
        raise WireError(f"a difference must be lists of at most {_MAX_CHANGES} changes")
    return [_decode_change(one) for one in found]


def _decode_change(payload: object) -> TreeChange:
    if not isinstance(payload, dict) or payload.keys() - _FIELDS:
        raise WireError("a change must be an object with the fields of TreeChange")
    path, text = payload.get("path"), payload.get("text")
    if not isinstance(path, str) or not 0 < len(path) <= _MAX_PATH or "\0" in path:
        raise WireError(f"a change has an invalid path, {path!r:.80}")
    if path.startswith("/") or ".." in path.split("/"):
        raise WireError(f"a change is outside of the work dir: {path!r:.80}")
    if text is not None and (not isinstance(text, str) or len(text) > _MAX_TEXT):
        raise WireError(f"the text of a change must have at most {_MAX_TEXT} characters")
    action = payload.get("action")
    if action not in get_args(ChangeAction):
        raise WireError(f"invalid action of a change: {action!r:.40}")
    old_kind, old_size, old_mode = (payload.get(f"old_{n}") for n in ("kind", "size", "mode"))
    return TreeChange(
        path=path,
        action=cast("ChangeAction", action),
        kind=_kind(payload.get("kind")),
        size=_whole(payload.get("size"), "size", _MAX_NUMBER),
        mode=_whole(payload.get("mode"), "mode", _MAX_MODE),
        old_kind=None if old_kind is None else _kind(old_kind),
        old_size=None if old_size is None else _whole(old_size, "old_size", _MAX_NUMBER),
        old_mode=None if old_mode is None else _whole(old_mode, "old_mode", _MAX_MODE),
        text=text,
    )


def _kind(value: object) -> FileKind:
    if value not in get_args(FileKind):
        raise WireError(f"invalid kind of a change: {value!r:.40}")
    return cast("FileKind", value)


def _whole(value: object, what: str, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise WireError(f"{what} must be a whole number from 0 to {maximum}, got {value!r:.40}")
    return value


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise WireError(f"{what} must be a number of seconds, got {value!r:.40}")
    return float(value)
