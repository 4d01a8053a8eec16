"""The secret from which the owner of a session can derive its tokens again, after a crash.

It is the variable ``UNION_SANDBOX_ATTACH_KEY``, or a file of the user that is made at first use.
The tokens of a session follow from it, the name of the run and a public random text in the inputs
of the run, so nothing secret is stored for a session.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
from typing import Final

from union.sandbox.errors import SandboxUsageError

__all__ = ["VARIABLE", "attach_key", "derive", "key_file"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
VARIABLE: Final = "UNION_SANDBOX_ATTACH_KEY"
_MIN_CHARACTERS: Final = 32


def key_file() -> str:
    """Return the path of the user's key file."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "union-sandbox", "attach-key")


def attach_key(*, create: bool) -> str | None:
    """Return the secret; None where there is none, and none can be made.

    Args:
        create: Whether to make the file if it does not exist. A file that cannot be used is then
            as good as none.

    Raises:
        SandboxUsageError: the variable is too short, or other users can read or change the file.

    """
    from union.sandbox.server._secret_files import read_secret

    given = os.environ.get(VARIABLE)
    if given is not None:
        if len(given) < _MIN_CHARACTERS:
            raise SandboxUsageError(
                f"{VARIABLE} must have at least {_MIN_CHARACTERS} characters, got {len(given)}",
                argument=VARIABLE,
                hint="python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        return given
    path = key_file()
    try:
        if create and not os.path.exists(path):
            _create(path)
        if not os.path.exists(path):
            return None
        return read_secret(VARIABLE, path, is_secret=True).strip()
    except (OSError, SandboxUsageError) as exc:
        if not create:
            raise
        _LOGGER.warning("this session cannot be attached to later: %s", exc)
        return None


def _create(path: str) -> None:
    """Write a new key to the file, unless another process does so first."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    new = f"{path}.{secrets.token_hex(8)}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        # A link is made of a complete file only, and by one process only.
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        os.unlink(new)


def derive(key: str, purpose: str, run: str, salt: str) -> bytes:
    """Return 32 secret bytes for one purpose of one run; ``salt`` is its own, and not secret."""
    message = json.dumps(["union.sandbox", purpose, run, salt]).encode()
    return hmac.new(key.encode(), message, hashlib.sha256).digest()
