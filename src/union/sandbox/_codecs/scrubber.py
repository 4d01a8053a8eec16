"""Replace secrets in a stream of bytes, also across the boundaries of its pieces.

Each secret is replaced by a text of the same length, so that no length in a message changes. A
piece is delayed only by a tail that could be the beginning of a secret.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ScrubTable", "Scrubber"]

_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class ScrubTable:
    """The forms of secrets to replace: as they are, in base64, percent-encoded.

    Args:
        pairs: each secret, with its replacement of the same length.

    """

    def __init__(self, pairs: tuple[tuple[bytes, bytes], ...]) -> None:
        forms: dict[bytes, bytes] = {}
        for secret, other in pairs:
            if len(secret) != len(other):
                raise ValueError("a secret and its replacement must have the same length")
            for form, replacement in _forms(secret, other):
                forms.setdefault(form, replacement)
        # The longest first: a form may contain another.
        self.forms = tuple(sorted(forms.items(), key=lambda item: -len(item[0])))
        self.starts = frozenset(form[0] for form in forms)
        self.max_bytes = max(map(len, forms), default=0)

    def replaced(self, data: bytes) -> bytes:
        """Return ``data`` with every form of a secret replaced."""
        for form, other in self.forms:
            if form in data:
                data = data.replace(form, other)
        return data


class Scrubber:
    """Scrub one stream.

    Args:
        table: the secrets to replace.

    """

    def __init__(self, table: ScrubTable) -> None:
        self._table = table
        self._held = b""

    @property
    def is_holding(self) -> bool:
        """Whether bytes are held back, because they could be the beginning of a secret."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return what can be sent of the bytes so far."""
        if self._held:
            data = self._held + data
        data = self._table.replaced(data)
        keep = self._partial(data)
        if not keep:
            self._held = b""
            return data
        self._held = data[-keep:]
        return data[:-keep]

    def finish(self) -> bytes:
        """Return the bytes that were held back: the stream has ended."""
        held, self._held = self._held, b""
        return held

    def _partial(self, data: bytes) -> int:
        """Return the length of the longest tail that is the beginning of a secret."""
        table = self._table
        tail = data[-(table.max_bytes - 1) :] if table.max_bytes > 1 else b""
        for at, first in enumerate(tail):
            if first in table.starts:
                rest = tail[at:]
                if any(len(form) > len(rest) and form.startswith(rest) for form, _ in table.forms):
                    return len(rest)
        return 0


def _forms(secret: bytes, other: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield secret, other
    for shift in range(3):
        form, replacement = _base64_core(secret, shift), _base64_core(other, shift)
        if len(form) > 4:
            yield form, replacement
            yield form.translate(_URL_SAFE), replacement.translate(_URL_SAFE)
    text, replacement_text = secret.decode("latin-1"), other.decode("latin-1")
    encoded = quote(secret, safe="")
    if encoded != text:
        # The replacement may contain other characters, so it is cut or filled to the same length.
        fixed = (replacement_text * 3)[: len(encoded)].ljust(len(encoded), "x").encode("latin-1")
        yield encoded.encode(), fixed
        lower = encoded.encode()
        for at in range(len(lower)):
            if lower[at : at + 1] == b"%":
                lower = lower[:at] + lower[at : at + 3].lower() + lower[at + 3 :]
        yield lower, fixed


def _base64_core(value: bytes, shift: int) -> bytes:
    """Return the base64 digits that depend on ``value`` alone, after ``shift`` other bytes."""
    encoded = base64.b64encode(bytes(shift) + value)
    first = (0, 2, 3)[shift]
    return encoded[first : (shift + len(value)) * 8 // 6]
