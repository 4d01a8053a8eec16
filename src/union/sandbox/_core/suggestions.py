"""Hints for invalid arguments: the accepted spelling nearest to the one received.

Loaded only when an error is about to be raised.
"""

from __future__ import annotations

import difflib
import inspect
import re
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.errors import UnknownArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["near", "near_size", "remedy", "unknown_argument"]

_KNOWN: Final = {
    "backend": {"bwrap": "bubblewrap", "namespaces": "userns", "seatbelt": "sandbox-exec"},
    "network_mode": {
        "allow": "allowlist",
        "closed": "blocked",
        "deny": "blocked",
        "disabled": "blocked",
        "full": "open",
        "host": "open",
        "none": "blocked",
        "off": "blocked",
        "on": "open",
        "whitelist": "allowlist",
    },
    "shell": {"/bin/bash": "bash", "/bin/sh": "sh", "dash": "sh", "zsh": "bash"},
    "script_type": {"bash": "shell", "py": "python", "python3": "python", "sh": "shell"},
}
"""Argument -> name of a value in other programs -> its name here."""
_KEYWORDS: Final = {
    "allow": "network_allowlist",
    "allowlist": "network_allowlist",
    "command": "cmd",
    "denylist": "network_denylist",
    "directory": "cwd",
    "environment": "env",
    "input": "stdin",
    "language": "script_type",
    "network": "network_mode",
    "ro_paths": "read_only_paths",
    "rw_paths": "read_write_paths",
    "seconds": "timeout_s",
    "time_limit": "timeout_s",
    "work_dir": "host_work_dir",
    "workdir": "cwd",
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])(?:i?b)?\s*", re.IGNORECASE)


def near(argument: str, value: object, accepted: Iterable[str]) -> str:
    """Return a hint that names the accepted text that was probably meant, or an empty text."""
    if not isinstance(value, str):
        return ""
    choices = list(accepted)
    text = value.strip().lower()
    if text in choices:
        return f"did you mean {text!r}?"
    known = _KNOWN.get(argument, {}).get(text)
    if known in choices:
        return f"did you mean {known!r}?"
    close = difflib.get_close_matches(text, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def near_size(value: object) -> str:
    """Return a hint with the accepted spelling of a size such as ``512MB``."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    meant = f"{match[1]}{match[2].upper()}i"
    return f'did you mean "{meant}"? Ki, Mi, Gi, Ti count in 1024; k, M, G, T in 1000'


def remedy(argument: str, value: object) -> str:
    """Return a hint for a value of a wrong type that has one obvious remedy."""
    kind = type(value).__name__
    if kind in {"coroutine", "async_generator"}:
        verb = "write `await` before" if kind == "coroutine" else "collect, with `async for`,"
        return f"{argument} is a {kind}: {verb} the call that returns it"
    if isinstance(value, str) and argument in {"read_only_paths", "read_write_paths", "preload"}:
        return f"pass a list: {argument}=[{value!r}]"
    return ""


def unknown_argument(
    call: Callable[..., Any], unknown: Mapping[str, object]
) -> UnknownArgumentError:
    """Return the error for keywords that ``call`` does not have, naming the first of them."""
    name = next(iter(unknown))
    accepted = [
        parameter.name
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    meant = _KEYWORDS.get(name.lower(), "")
    if meant not in accepted:
        suffixed = [
            f"{name}{end}" for end in ("_s", "_paths", "_bytes") if f"{name}{end}" in accepted
        ]
        meant = (suffixed or difflib.get_close_matches(name, accepted, n=1) or [""])[0]
    return UnknownArgumentError(
        f"{call.__name__}() got an unknown argument {name!r}",
        argument=name,
        hint=f"did you mean {meant!r}?" if meant else "it accepts: " + ", ".join(accepted),
    )
