"""Logs: one JSON object per line on stderr. No token, no command, no environment, no file.

Secrets are kept out in three ways. Nothing here logs values of a request. Messages of exceptions
that other libraries log are left out, only their types and places are kept. And every line is
searched for what looks like a credential before it is written.
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

__all__ = ["RateLimit", "redact", "set_up"]

_OWN: Final = "union.sandbox"
_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HIDDEN: Final = "[redacted]"
_CREDENTIALS: Final = (
    re.compile(r"(?i)\b(bearer|basic|digest|negotiate)(\s|\\[rnt])+[^\s\"'\\,;]+"),
    re.compile(r"(?i)\b((?:proxy-)?authorization|cookie|x-[a-z-]*(?:token|key))\s*[:=][^\"'\n]*"),
    re.compile(r"\bcap1\.[^\s\"'\\]+"),
    re.compile(r"(?<=://)[^/\s\"'@]+@"),
    re.compile(r"(?i)(?<=[?&;])(access_token|token|key|secret|password|sig|signature)=[^&\s\"']*"),
)
_WORD: Final = re.compile(r"[^\s\"'<>(){}\[\],;\\]{16,}")
_PER_PERIOD: Final = 20
_PERIOD_S: Final = 10.0
_MAX_KINDS: Final = 256


def redact(text: str, is_token: Callable[[str], bool] | None = None) -> str:
    """Replace what looks like a credential, and every word that ``is_token`` recognises."""
    for pattern in _CREDENTIALS:
        text = pattern.sub(_HIDDEN, text)
    if is_token is not None:
        text = _WORD.sub(lambda found: _HIDDEN if is_token(found[0]) else found[0], text)
    return text


class RateLimit(logging.Filter):
    """Passes at most 20 warnings or errors of a kind in ten seconds; counts the others."""

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
        if seen[1] > _PER_PERIOD:
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
        # Behind the first line of what asyncio logs stand values, such as that of an exception.
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": self._clean(message if own else message.partition("\n")[0]),
        }
        for name, value in vars(record).items():
            if name not in _USUAL:
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
    """The way to an error, and to those behind it."""
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


def set_up(level: str, is_token: Callable[[str], bool] | None = None) -> None:
    """Send every log record of the process to stderr, as lines of JSON.

    Args:
        level: The lowest level that is written.
        is_token: Recognises a token of this server, which is then left out wherever it appears.

    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(is_token))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
