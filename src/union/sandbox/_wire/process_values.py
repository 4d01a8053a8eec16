"""Processes of a session as JSON values."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from union.sandbox._core.processes import MAX_COMMAND_BYTES, MAX_LISTED, ProcessInfo
from union.sandbox._wire.frames import WireError

__all__ = ["decode_processes", "encode_processes"]

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "pid": (int,),
    "parent": (int,),
    "name": (str,),
    "command": (list,),
    "started_at": (int, float),
    "cpu_s": (int, float),
    "memory_bytes": (int,),
    "left_behind": (bool,),
}


def encode_processes(found: tuple[ProcessInfo, ...]) -> dict[str, Any]:
    """Encode a listing."""
    return {"processes": [dataclasses.asdict(info) for info in found]}


def decode_processes(payload: dict[str, Any]) -> tuple[ProcessInfo, ...]:
    """Decode a listing; raise WireError if it is malformed."""
    found = payload["processes"]
    if not isinstance(found, list) or len(found) > MAX_LISTED:
        raise WireError(f"processes must be a list of at most {MAX_LISTED} entries")
    return tuple(map(_decode, found))


def _decode(value: object) -> ProcessInfo:
    if not isinstance(value, dict):
        raise WireError("a process must be an object")
    for name, types in _TYPES.items():
        item = value.get(name)
        if not isinstance(item, types) or (isinstance(item, bool) and bool not in types):
            raise WireError(f"{name} of a process has an invalid value")
    command = value["command"]
    if not all(isinstance(word, str) for word in command):
        raise WireError("command of a process must be a list of strings")
    if sum(map(len, command)) > MAX_COMMAND_BYTES:
        raise WireError(f"command of a process must have at most {MAX_COMMAND_BYTES} characters")
    known = {name: value[name] for name in _TYPES}
    return ProcessInfo(**(known | {"command": tuple(command)}))
