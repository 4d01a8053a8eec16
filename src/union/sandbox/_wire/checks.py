"""Checks of single values that a peer sent."""

from __future__ import annotations

import math
from typing import Any

from union.sandbox._wire.frames import WireError

__all__ = ["checked", "number"]


def checked(value: object, kind: type | tuple[type, ...], what: str) -> Any:
    """Return a value of this type; a bool is no number."""
    if isinstance(value, bool) and kind is not bool:
        raise WireError(f"{what} must be {_type_names(kind)}, got {value!r}")
    if not isinstance(value, kind):
        raise WireError(f"{what} must be {_type_names(kind)}, got {type(value).__name__}")
    return value


def _type_names(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(each.__name__ for each in kinds)


def number(value: object, what: str) -> float:
    """Return a finite number as a float; JSON has integers that are too large for one."""
    try:
        found = float(checked(value, (int, float), what))
    except OverflowError as exc:
        raise WireError(f"{what} is too large") from exc
    if not math.isfinite(found):
        raise WireError(f"{what} is not finite")
    return found
