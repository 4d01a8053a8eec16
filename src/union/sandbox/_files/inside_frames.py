"""Messages between the host and the helper that performs file calls inside a sandbox.

A message is a head (a JSON object) and a body (bytes), each with its length in front. The helper is
hostile: every length, number, name and kind of a reply is checked here, and a reply that is not as
it must be ends the connection.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from typing import TYPE_CHECKING, Any, Final, get_args

from union.sandbox._core.files import ChangeKind, FileChange, FileInfo, FileKind

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PIECE_BYTES", "Decoder", "FrameError", "Reply", "encode"]

PIECE_BYTES: Final = 1024 * 1024
"""The largest body."""
_MAX_HEAD: Final = 512 * 1024
_SIZES: Final = struct.Struct("!II")
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 4095
_LAST_ERRNO: Final = 4095
_MAX_WHY: Final = 200
_MAX_SIZE: Final = 2**63
_INFO_FIELDS: Final = 4
_KINDS: Final[dict[int, FileKind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
}


class FrameError(Exception):
    """A message of the helper violates the protocol."""


def encode(head: dict[str, Any], body: bytes | memoryview = b"") -> bytes:
    """Return one message."""
    text = json.dumps(head).encode()
    return b"".join((_SIZES.pack(len(text), len(body)), text, body))


class Decoder:
    """Split a stream into messages; holds at most one that is incomplete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Add bytes of the stream and yield the replies that are complete.

        Raises:
            FrameError: the stream is no sequence of replies.

        """
        self._held += data
        while len(self._held) >= _SIZES.size:
            head_size, body_size = _SIZES.unpack_from(self._held)
            if head_size > _MAX_HEAD or body_size > PIECE_BYTES:
                raise FrameError(f"a message of {head_size} + {body_size} bytes")
            begin = _SIZES.size + head_size
            end = begin + body_size
            if len(self._held) < end:
                return
            with memoryview(self._held) as view:
                head, body = bytes(view[_SIZES.size : begin]), bytes(view[begin:end])
            del self._held[:end]
            yield Reply(_parsed(head), body)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise FrameError("a head that is no JSON") from exc
    if not isinstance(head, dict):
        raise FrameError("a head that is no object")
    return head


class Reply:
    """One reply; each accessor checks what it returns."""

    __slots__ = ("_head", "body", "is_last", "number")

    def __init__(self, head: dict[str, Any], body: bytes) -> None:
        self._head = head
        self.body = body
        self.number = _whole(head.get("id"), _MAX_SIZE)
        self.is_last = head.get("end") is True

    @property
    def error(self) -> tuple[int, str] | None:
        """The errno and the reason of a call that failed."""
        number = self._head.get("errno")
        if number is None:
            return None
        why = self._head.get("why")
        text = why[:_MAX_WHY] if isinstance(why, str) else ""
        clean = "".join(char if char.isprintable() else "\ufffd" for char in text)
        return max(1, _whole(number, _LAST_ERRNO)), clean

    @property
    def size(self) -> int:
        """The size of a file after a call."""
        return _whole(self._head.get("size"), _MAX_SIZE)

    def info(self, path: str) -> FileInfo:
        """Return the description of ``path``."""
        return _info(self._head.get("info"), path)

    def entries(self, prefix: str) -> Iterator[FileInfo]:
        """Yield the descriptions of a piece of a listing; a name is never a path."""
        for item in self._items():
            name = item[0] if isinstance(item, list) and item else None
            yield _info(item, prefix + _name(name))

    def paths(self) -> Iterator[str]:
        """Yield the paths of a piece of a result of ``glob``."""
        for item in self._items():
            yield _path(item)

    def changes(self, prefix: str) -> Iterator[FileChange]:
        """Yield the changes of a piece of a watch."""
        for item in self._items():
            if not isinstance(item, list) or len(item) != 2 or item[1] not in get_args(ChangeKind):
                raise FrameError("a change that is no path and kind")
            below = item[0]
            path = prefix.rstrip("/") or prefix if below == "" else prefix + _path(below)
            yield FileChange(path=path, kind=item[1])

    def _items(self) -> list[Any]:
        items = self._head.get("items")
        if not isinstance(items, list):
            raise FrameError("no list of items")
        return items


def _whole(value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise FrameError("a number that is missing or out of range")
    return value


def _name(value: object) -> str:
    name = _path(value, _MAX_NAME_BYTES)
    if "/" in name or name in {".", ".."}:
        raise FrameError("the name of an entry that is a path")
    return name


def _path(value: object, limit: int = _MAX_PATH_BYTES) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise FrameError("a path that is none")
    try:
        size = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as exc:
        raise FrameError("a path that stands for no bytes") from exc
    if size > limit:
        raise FrameError("a path that is too long")
    return value


def _info(value: object, path: str) -> FileInfo:
    if not isinstance(value, list) or len(value) != _INFO_FIELDS:
        raise FrameError("a description that is incomplete")
    _, mode, size, mtime = value
    checked = _whole(mode, 0o177777)
    if isinstance(mtime, bool) or not isinstance(mtime, int | float) or not math.isfinite(mtime):
        raise FrameError("a time that is none")
    return FileInfo(
        path=path,
        kind=_KINDS.get(stat.S_IFMT(checked), "other"),
        size=_whole(size, _MAX_SIZE),
        mode=stat.S_IMODE(checked),
        mtime=float(mtime),
    )
