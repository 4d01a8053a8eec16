"""The two tokens of a session, and the digests that recognise them.

The owner's token opens everything; the guest's runs commands and moves files in the one session.
The process that starts the session makes both: from the secret of its user, so that it can make
them again after a crash, or else at random. The server gets their digests, from which neither can
be derived, and so does everyone who can read the inputs of the run. The key pair of the server's
announcement is separate from both (``_announce.py``).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass, field

from union.sandbox.cluster._attach_key import attach_key, derive

__all__ = ["Keys", "session_name", "verifier_of"]


def verifier_of(key: str) -> str:
    """Return the digest that recognises ``key`` without revealing it."""
    return hashlib.sha256(key.encode()).hexdigest()


def session_name(run: str) -> str:
    """Return the name of a run's only session on its server: not secret, the same for everyone."""
    return hashlib.sha256(f"union.sandbox session of {run}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The tokens of one session, made by its owner."""

    owner: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    guest: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    announcement: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """The seed of the key pair that signs the server's announcement."""

    @classmethod
    def for_run(cls, run: str, salt: str) -> Keys:
        """Return the keys of a new run; at random where the user has no secret."""
        key = attach_key(create=True)
        return cls() if key is None else cls.derived(key, run, salt)

    @classmethod
    def derived(cls, key: str, run: str, salt: str) -> Keys:
        """Return the keys of a run, which follow from the user's secret."""

        def token(purpose: str) -> str:
            return base64.urlsafe_b64encode(derive(key, purpose, run, salt)).rstrip(b"=").decode()

        return cls(
            owner=token("owner's token"),
            guest=token("guest's token"),
            announcement=derive(key, "announcement", run, salt),
        )
