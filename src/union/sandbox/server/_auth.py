"""Authentication and authorisation: the server's token, and capabilities for one session.

The server stores the digest of its token, not the token. A capability is issued by the server for
one session, with an expiry and a message authentication code. Its holder can run commands and copy
files in that session, but not end it, open or list sessions, or issue capabilities. Checkpoints of
the session are a right of their own, which a capability has if it was requested.
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
from typing import Any, Final

from union.sandbox.errors import SandboxUsageError

__all__ = ["Authority", "Grant", "Guest", "Verifier", "issue_capability"]

_PREFIX: Final = "cap1."
_MAX_CAPABILITY_CHARS: Final = 1024
_MAX_CAPABILITY_S: Final = 24 * 3600.0
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a request: all, or with ``session`` the use of that session."""

    session: str | None = None
    key: str = field(default="owner", compare=False)
    """Identity of the key: a run that one key started is invisible to the others."""
    has_checkpoints: bool = field(default=False, compare=False)
    """Whether a key of one session may take its checkpoints and return to them."""

    @property
    def is_full(self) -> bool:
        return self.session is None

    @property
    def may_checkpoint(self) -> bool:
        return self.is_full or self.has_checkpoints

    def covers(self, session: str) -> bool:
        return self.session in {None, session}

    @property
    def role(self) -> str:
        """The kind of the token: ``owner``, ``capability``, ``guest`` or ``metrics``."""
        return "owner" if self.is_full else self.key.partition(":")[0]

    @property
    def reads_metrics(self) -> bool:
        return self.is_full or self == SCRAPE_GRANT


SCRAPE_GRANT: Final = Grant("metrics", "metrics")
"""The right to read the metrics, and nothing else: no session has this name."""


class Verifier:
    """Checks a token against a stored digest."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def from_token(cls, token: str) -> Verifier:
        return cls(hashlib.sha256(token.encode()).digest())

    @classmethod
    def from_digest(cls, text: str, *, argument: str) -> Verifier:
        if not _HEX.fullmatch(text):
            raise SandboxUsageError(
                f"{argument} must be 64 hexadecimal digits, got {len(text)} characters",
                argument=argument,
                hint="printf %s TOKEN | sha256sum",
            )
        return cls(bytes.fromhex(text))

    def accepts(self, token: str) -> bool:
        found = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return hmac.compare_digest(found, self._digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A second token, for one session and a limited time."""

    verifier: Verifier
    session: str
    until: float
    """Unix time."""


class Authority:
    """Decides what the bearer of a token may do, and issues capabilities."""

    def __init__(
        self,
        verifier: Verifier | None,
        guest: Guest | None = None,
        scraper: Verifier | None = None,
    ) -> None:
        self._verifier = verifier
        self._guest = guest
        self._scraper = scraper
        self.owner_last_seen: float | None = None
        """Monotonic time of the last request with the server's own token."""
        # The key is not stored: a capability is void after a restart, as its session is.
        self._key = secrets.token_bytes(32)

    @property
    def requires_token(self) -> bool:
        """Whether requests need a token."""
        return self._verifier is not None

    def authenticate(self, authorization: str | None) -> Grant | None:
        """Return the grant of an ``Authorization`` header; None if it is not valid."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if token.startswith(_PREFIX):
            return self._capability(token)
        if self._verifier is None:
            return Grant()
        if not token:
            return None
        if self._verifier.accepts(token):
            self.owner_last_seen = time.monotonic()
            return Grant()
        guest = self._guest
        if guest is not None and guest.verifier.accepts(token) and time.time() < guest.until:
            return Grant(guest.session, "guest")
        if self._scraper is not None and self._scraper.accepts(token):
            return SCRAPE_GRANT
        return None

    def make_capability(
        self, session: str, *, lifetime_s: float, has_checkpoints: bool = False
    ) -> str:
        """Return a token for one session that is valid for ``lifetime_s`` seconds."""
        until = round(time.time() + lifetime_s, 3)
        claims = json.dumps([session, until, has_checkpoints]).encode()
        body = base64.urlsafe_b64encode(claims).decode()
        return f"{_PREFIX}{body}.{self._code(body)}"

    def _code(self, body: str) -> str:
        text = body.encode("utf-8", "surrogateescape")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def _capability(self, token: str) -> Grant | None:
        body, _, code = token[len(_PREFIX) : _MAX_CAPABILITY_CHARS].partition(".")
        if not hmac.compare_digest(self._code(body).encode(), code.encode("utf-8", "replace")):
            return None
        try:
            session, until, has_checkpoints = json.loads(base64.urlsafe_b64decode(body))
        except (ValueError, binascii.Error) as exc:
            raise RuntimeError("a capability with a valid code cannot be parsed") from exc
        if time.time() >= until:
            return None
        key = f"capability:{hashlib.sha256(token.encode()).hexdigest()}"
        return Grant(session, key, has_checkpoints=has_checkpoints)


def issue_capability(authority: Authority, session: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request for a capability.

    Raises:
        SandboxUsageError: a field has the wrong type or is out of range.

    """
    seconds = payload.get("expires_s", 3600)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise SandboxUsageError(
            f"expires_s must be a number of seconds, got {type(seconds).__name__}",
            argument="expires_s",
        )
    if not 0 < seconds <= _MAX_CAPABILITY_S:
        raise SandboxUsageError(
            f"expires_s must be more than 0 and at most {_MAX_CAPABILITY_S:g} seconds, "
            f"got {seconds!r}",
            argument="expires_s",
        )
    has_checkpoints = payload.get("checkpoints", False)
    if not isinstance(has_checkpoints, bool):
        raise SandboxUsageError(
            f"checkpoints must be true or false, got {type(has_checkpoints).__name__}",
            argument="checkpoints",
        )
    token = authority.make_capability(session, lifetime_s=seconds, has_checkpoints=has_checkpoints)
    return {"token": token}
