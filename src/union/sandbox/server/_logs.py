"""Logging: one JSON object per line on stderr, without tokens, commands, environments or files.

Secrets are kept out in three ways. The server logs no values of requests. Of exceptions that other
libraries log, only the type and the traceback are kept, not the message. Every line is searched for
credentials before it is written.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RateLimit", "redact", "set_up_logging"]

_OWN: Final = "union.sandbox"
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}
_REDACTED: Final = "[redacted]"
_CREDENTIALS: Final = (
    re.compile(r"(?i)\b(bearer|basic|digest|negotiate)(\s|\\[rnt])+[^\s\"'\\,;]+"),
    re.compile(r"(?i)\b((?:proxy-)?authorization|cookie|x-[a-z-]*(?:token|key))\s*[:=][^\"'\n]*"),
    re.compile(r"\bcap1\.[^\s\"'\\]+"),
    re.compile(r"(?<=://)[^/\s\"'@]+@"),
    re.compile(r"(?i)(?<=[?&;])(access_token|token|key|secret|password|sig|signature)=[^&\s\"']*"),
)
_TOKEN_LIKE: Final = re.compile(r"[^\s\"'<>(){}\[\],;\\]{16,}")
_MAX_PER_PERIOD: Final = 20
_PERIOD_S: Final = 10.0
_MAX_KINDS: Final = 256


def redact(text: str, is_token: Callable[[str], bool] | None = None) -> str:
    """Replace everything that looks like a credential, and words that ``is_token`` accepts."""
    for pattern in _CREDENTIALS:
        text = pattern.sub(_REDACTED, text)
    if is_token is not None:
        text = _TOKEN_LIKE.sub(lambda found: _REDACTED if is_token(found[0]) else found[0], text)
    return text


class RateLimit(logging.Filter):
    """Pass at most 20 warnings or errors of a kind in ten seconds; count the others."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str, object], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.name, str(record.msg)[:200], error)
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        seen = self._kinds.setdefault(kind, [record.created, 0, 0])
        if record.created - seen[0] >= _PERIOD_S:
            if seen[2]:
                record.suppressed = int(seen[2])
            seen[:] = [record.created, 0, 0]
        seen[1] += 1
        if seen[1] > _MAX_PER_PERIOD:
            seen[2] += 1
            return False
        return True


class _Json(logging.Formatter):
    def __init__(self, is_token: Callable[[str], bool] | None) -> None:
        super().__init__()
        self._is_token = is_token

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.split(".")[:2] == _OWN.split(".")
        message = record.getMessage()
        # In messages of asyncio, values such as exceptions follow after the first line.
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": self._clean(message if own else message.partition("\n")[0]),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                plain = isinstance(value, bool | int | float) or value is None
                line[name] = value if plain else self._clean_value(value)
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = self._clean(_trace(record.exc_info[1], with_messages=own))
        return json.dumps(line, default=str)

    def _clean(self, text: str) -> str:
        return redact(text, self._is_token)

    def _clean_value(self, value: object) -> object:
        if isinstance(value, list | tuple):
            return [self._clean_value(item) for item in value]
        return self._clean(str(value))


def _trace(error: BaseException, *, with_messages: bool) -> str:
    """Return the traceback of an error and of its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        frames = traceback.format_tb(found.__traceback__)
        name = f"{type(found).__module__}.{type(found).__qualname__}"
        end = f"{name}: {found}" if with_messages else name
        lines[:0] = [*frames, end + "\n"]
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "Traceback (most recent call last):\n" + "".join(lines)


def set_up_logging(level: str, is_token: Callable[[str], bool] | None = None) -> None:
    """Write every log record of the process to stderr, as lines of JSON.

    Args:
        level: The lowest level that is written.
        is_token: Returns whether a word is a token of this server; such words are redacted.

    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(is_token))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
