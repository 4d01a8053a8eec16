"""Who may do what: the token, and the smaller capabilities that its holder can hand on.

The server keeps no token, only its digest: that is enough to recognise one. A capability is made
by the server for one session, carries its own expiry and a code that only this server can make. It
can run commands and move files in that session; it can not end it, open another, look at others or
hand out more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from union.sandbox.errors import SandboxUsageError

__all__ = ["Authority", "Grant", "Guest", "Verifier"]

_PREFIX: Final = "cap1."
_MOST: Final = 1024
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may do. ``session`` None: everything."""

    session: str | None = None
    key: str = field(default="owner", compare=False)
    """Whose key it is: what one caller began, another one cannot go on with."""

    @property
    def is_full(self) -> bool:
        return self.session is None

    def covers(self, session: str) -> bool:
        return self.session in {None, session}


class Verifier:
    """Recognises one token without knowing it."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def from_token(cls, token: str) -> Verifier:
        return cls(hashlib.sha256(token.encode()).digest())

    @classmethod
    def from_digest(cls, text: str, *, argument: str) -> Verifier:
        if not _HEX.fullmatch(text):
            raise SandboxUsageError(
                f"{argument} must hold 64 hexadecimal digits", argument=argument
            )
        return cls(bytes.fromhex(text))

    def accepts(self, token: str) -> bool:
        found = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return hmac.compare_digest(found, self._digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A second token, known by its digest: for one session, and for a time."""

    verifier: Verifier
    session: str
    until: float
    """Unix time."""


class Authority:
    """Decides what the bearer of a token may do, and makes capabilities."""

    def __init__(self, verifier: Verifier | None, guest: Guest | None = None) -> None:
        self._verifier = verifier
        self._guest = guest
        self.owner_heard: float | None = None
        """When the bearer of the server's own token was last heard, by the monotonic clock."""
        # Lives as long as the process: a capability does not outlast the sessions it is for.
        self._key = secrets.token_bytes(32)

    @property
    def asks(self) -> bool:
        """Whether there is a token at all."""
        return self._verifier is not None

    def judge(self, authorization: str | None) -> Grant | None:
        """The grant of an ``Authorization`` header; None: none at all."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if token.startswith(_PREFIX):
            return self._capability(token)
        if self._verifier is None:
            return Grant()
        if not token:
            return None
        if self._verifier.accepts(token):
            self.owner_heard = time.monotonic()
            return Grant()
        guest = self._guest
        if guest is not None and guest.verifier.accepts(token) and time.time() < guest.until:
            return Grant(guest.session, "guest")
        return None

    def make_capability(self, session: str, *, lifetime_s: float) -> str:
        claims = json.dumps([session, round(time.time() + lifetime_s, 3)]).encode()
        body = base64.urlsafe_b64encode(claims).decode()
        return f"{_PREFIX}{body}.{self._code(body)}"

    def _code(self, body: str) -> str:
        text = body.encode("utf-8", "surrogateescape")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def _capability(self, token: str) -> Grant | None:
        body, _, code = token[len(_PREFIX) : _MOST].partition(".")
        if not hmac.compare_digest(self._code(body).encode(), code.encode("utf-8", "replace")):
            return None
        try:
            session, until = json.loads(base64.urlsafe_b64decode(body))
        except (ValueError, binascii.Error) as exc:
            raise RuntimeError("a capability of ours cannot be read") from exc
        if time.time() >= until:
            return None
        return Grant(session, f"capability:{hashlib.sha256(token.encode()).hexdigest()}")
