"""The signed line in which the server of a run announces its address.

No message of the platform carries the address of a pod, so the server publishes it: in its log, and
in an object that the caller named. Both can be written by others. The owner therefore makes a key
pair for each session. The signing key goes into the inputs of the server's run and nowhere else;
references passed to other tasks carry the public key, which verifies a line and cannot sign one. A
line names its run and its expiry: a line of another run, an old one or an edited one is refused.

The line also holds the fingerprint of the server's certificate, and a line without one is refused.
A client connects to the server with that certificate or to none, so that the server has proved that
it is the one announced before any token is sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from union.sandbox._wire.endpoint import parse_endpoint
from union.sandbox.errors import SandboxUsageError

__all__ = ["PREFIX", "Announcement", "announce", "new_signing_key", "parse_announcement"]

PREFIX: Final = "union-sandbox-announcement "
_VERSION: Final = 2
_MAX_LINE: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The address of the server of a run; or, in ``failed``, why there is none."""

    run: str
    endpoint: str = ""
    """With the fingerprint of its certificate."""
    protocol: int
    expires: float
    """Unix time."""
    failed: dict[str, Any] | None = None
    """An error as the wire carries it."""


def new_signing_key(seed: bytes | None = None) -> tuple[str, str]:
    """Make a key pair; return the signing key and the public key, in hexadecimal.

    ``seed`` are 32 secret bytes, which determine the pair; None: a random pair.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = (
        Ed25519PrivateKey.generate() if seed is None else Ed25519PrivateKey.from_private_bytes(seed)
    )
    return private.private_bytes_raw().hex(), private.public_key().public_bytes_raw().hex()


def announce(announcement: Announcement, *, key: str) -> str:
    """Return the signed line, without a line end. ``key`` is the signing key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    payload = json.dumps({"version": _VERSION, **asdict(announcement)}, separators=(",", ":"))
    signer = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key))
    signature = signer.sign((PREFIX + payload).encode()).hex()
    line = json.dumps({"payload": payload, "signature": signature}, separators=(",", ":"))
    return PREFIX + line


def _is_signed(payload: str, signature: str, key: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), (PREFIX + payload).encode("utf-8", "replace"))
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_announcement(line: str, *, key: str, run: str, now: float) -> Announcement | None:
    """Return the announcement of a line that is valid for this run; None for any other line.

    ``key`` is the public key.
    """
    at = line.find(PREFIX)
    if at < 0 or len(line) > _MAX_LINE:
        return None
    try:
        both = json.loads(line[at + len(PREFIX) :])
        payload, signature = both["payload"], both["signature"]
        if not isinstance(payload, str) or not isinstance(signature, str):
            return None
        if not _is_signed(payload, signature, key):
            return None
        values = json.loads(payload)
        if values.pop("version") != _VERSION:
            return None
        found = Announcement(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if found.run != run or not now < found.expires:
        return None
    return found if found.failed is not None or _is_pinned(found.endpoint) else None


def _is_pinned(endpoint: str) -> bool:
    try:
        return parse_endpoint(endpoint).fingerprint is not None
    except SandboxUsageError:
        return False
