"""What a server says of itself when it is ready: one line, which only it could have written.

No message of the platform carries the address of a pod, so the server says it itself: in its log,
and in an object that the caller named. Both can be written by others. So the line has a code that
is made with the owner's verifier, a value that is random for each session, and names the run and
the time until it holds: a line of another run, an old one or an edited one is no line at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from union.sandbox._core.endpoint import parse_endpoint
from union.sandbox.errors import SandboxUsageError

__all__ = ["PREFIX", "Announcement", "announce", "heard"]

PREFIX: Final = "union-sandbox-announcement "
_VERSION: Final = 1
_MOST: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Where the server of a run is; or, in ``failed``, why there is none."""

    run: str
    endpoint: str = ""
    """With the fingerprint of its certificate, where it has one."""
    protocol: int
    expires: float
    """Unix time."""
    failed: dict[str, Any] | None = None
    """An error as the wire carries it."""


def _code(key: str, told: dict[str, Any]) -> str:
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hmac.new(key.encode(), (PREFIX + text).encode(), hashlib.sha256).hexdigest()


def announce(announcement: Announcement, *, key: str) -> str:
    """The line, without its end. ``key`` is the owner's verifier."""
    told = {"version": _VERSION, **asdict(announcement)}
    return PREFIX + json.dumps({"told": told, "code": _code(key, told)}, separators=(",", ":"))


def heard(line: str, *, key: str, run: str, now: float) -> Announcement | None:
    """What a line announces for this run; None for any other line, whatever it claims."""
    at = line.find(PREFIX)
    if at < 0 or len(line) > _MOST:
        return None
    try:
        both = json.loads(line[at + len(PREFIX) :])
        told, code = both["told"], both["code"]
        if not isinstance(told, dict) or not isinstance(code, str):
            return None
        if not hmac.compare_digest(_code(key, told).encode(), code.encode("utf-8", "replace")):
            return None
        if told.pop("version") != _VERSION:
            return None
        found = Announcement(**told)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if found.run != run or not now < found.expires:
        return None
    if found.failed is None:
        try:
            parse_endpoint(found.endpoint)
        except SandboxUsageError:
            return None
    return found
