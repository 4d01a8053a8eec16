"""The two keys of a session, and what may be told of them.

The owner's key opens everything; the guest's runs commands and moves files in the one session. Both
are made by whoever starts the session, and both are random. The server gets their digests, from
which neither key can be had: so does everybody who can read the inputs of the run.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

__all__ = ["Keys", "session_name", "verifier_of"]


def verifier_of(key: str) -> str:
    """What recognises ``key`` without being it."""
    return hashlib.sha256(key.encode()).hexdigest()


def session_name(run: str) -> str:
    """What the one session of a run is called on its server: no secret, and the same for all."""
    return hashlib.sha256(f"union.sandbox session of {run}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Made for one session, by its owner."""

    owner: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    guest: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
