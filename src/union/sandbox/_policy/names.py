"""Normalise DNS names to one spelling, or reject them.

The policy and the resolver use the same string: the result of :func:`normalise_name`. Text that two
programs could parse differently is rejected instead of repaired: control characters, percent signs,
separators that only appear after Unicode mapping, and letters on which the IDNA standards disagree.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

__all__ = ["NameSyntaxError", "normalise_name"]

_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_MAX_NAME_CHARS: Final = 253
_MAX_INPUT_CHARS: Final = 1024
_DEVIATIONS: Final = frozenset("\u00df\u1e9e\u03c2\u200c\u200d")
"""IDNA 2003 maps these away and IDNA 2008 keeps them: two different hosts for one spelling.

The second is the capital form of the first, which newer tables map to the small letter.
"""


class NameSyntaxError(ValueError):
    """The text is not a DNS name; the message gives the reason without repeating the text."""


def normalise_name(text: str) -> str:
    """Return the lower-case ASCII form without a trailing dot.

    Raises:
        NameSyntaxError: the text is not a name, or programs differ in how they parse it.

    """
    if len(text) > _MAX_INPUT_CHARS:
        raise NameSyntaxError(f"is longer than {_MAX_INPUT_CHARS} characters")
    if text.isascii():
        if " " in text or not text.isprintable():
            raise NameSyntaxError("contains a space or a control character")
        name = text.lower()
    else:
        _reject_ambiguous(text)
        name = unicodedata.normalize("NFKC", text).replace("\u3002", ".").lower()
    name = name.removesuffix(".")
    if not name:
        raise NameSyntaxError("is empty")
    labels = [_normalise_label(label) for label in name.split(".")]
    name = ".".join(labels)
    if len(name) > _MAX_NAME_CHARS:
        raise NameSyntaxError(f"is longer than {_MAX_NAME_CHARS} characters")
    return name


def _reject_ambiguous(text: str) -> None:
    for character in text:
        if character.isspace() or unicodedata.category(character) in {"Cc", "Cs", "Co", "Cn"}:
            raise NameSyntaxError("contains a space or a control character")
        if character in _DEVIATIONS:
            raise NameSyntaxError(
                "contains a letter on which the IDNA standards disagree; write it in its xn-- form"
            )


def _normalise_label(label: str) -> str:
    if not label:
        raise NameSyntaxError("has an empty label")
    if not label.isascii():
        try:
            label = label.encode("idna").decode("ascii").lower()
        except UnicodeError as exc:
            raise NameSyntaxError("has a label that IDNA cannot encode") from exc
    if _LABEL.fullmatch(label) is None:
        raise NameSyntaxError(
            "has a label that is not 1 to 63 letters, digits, '-' or '_', or that begins or ends "
            "with '-'"
        )
    return label
