"""A credential that the sandbox may use and must never show."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NoReturn

from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Secret"]

_MAX_CHARS: Final = 16 * 1024
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_PUBLIC_PREFIXES: Final = (
    "sk-ant-api03-", "sk-ant-", "sk-proj-", "sk-or-v1-", "sk-", "sk_live_", "sk_test_", "pk_live_",
    "pk_test_", "rk_live_", "rk_test_", "github_pat_", "ghp_", "gho_", "ghu_", "ghs_", "glpat-",
    "xoxb-", "xoxp-", "xapp-", "hf_", "gsk_", "r8_", "tvly-", "pplx-", "npm_", "pypi-", "dop_v1_",
    "AIza", "SG.", "key-", "lsv2_pt_", "nvapi-", "xai-",
)  # fmt: skip
"""Beginnings of keys that their services publish, longest first where one contains another. Clients
check them, so a placeholder keeps them. No other character of a secret is part of a placeholder."""
_MIN_RANDOM: Final = 8


class Secret:
    """A credential. Its value is in no ``repr``, log, pickle or error.

    Args:
        value: the credential, a text without control characters.
        placeholder: the text that programs inside see in its place. Default None: a random text of
            the same length, with the published prefix of the value (``sk-``, ``ghp_``), because
            clients check both. It must have the length of the value.

    Raises:
        PolicyError: the value is empty, too long, or contains a control character.

    """

    __slots__ = ("__weakref__", "_placeholder", "_value")

    def __init__(self, value: str, *, placeholder: str | None = None) -> None:
        if not isinstance(value, str):
            raise PolicyError(
                f"Secret: the value must be a string, got {type(value).__name__}", argument="value"
            )
        if not 1 <= len(value) <= _MAX_CHARS:
            raise PolicyError(
                f"Secret: the value must have 1 to {_MAX_CHARS} characters, got {len(value)}",
                argument="value",
                hint="an empty value often means that a variable is not set",
            )
        if any(ord(character) < 0x20 or ord(character) == 0x7F for character in value):
            raise PolicyError(
                "Secret: the value contains a control character",
                argument="value",
                hint="a value that was read from a file ends with a newline: use .strip()",
            )
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise PolicyError(
                "Secret: the value cannot be encoded as UTF-8", argument="value"
            ) from None
        if placeholder is None:
            placeholder = _placeholder_for(value, size)
        elif len(placeholder.encode()) != size or placeholder == value:
            raise PolicyError(
                "Secret: the placeholder must have the length of the value and differ from it",
                argument="placeholder",
            )
        self._value = value
        self._placeholder = placeholder

    @property
    def placeholder(self) -> str:
        """The text that programs inside see in place of the value."""
        return self._placeholder

    def reveal(self) -> str:
        """Return the value."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError("a Secret cannot be pickled")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled")


def _placeholder_for(value: str, size: int) -> str:
    prefix = next((known for known in _PUBLIC_PREFIXES if value.startswith(known)), "")
    if size - len(prefix) < _MIN_RANDOM:
        prefix = ""
    while True:
        rest = "".join(secrets.choice(_LETTERS) for _ in range(size - len(prefix)))
        if prefix + rest != value:
            return prefix + rest
