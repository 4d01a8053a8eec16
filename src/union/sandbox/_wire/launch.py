"""The launch document: the one line of JSON that a supervised server reads from its stdin.

A supervisor writes it (``cluster``), the server reads it (``server/_supervised.py``). It carries
the digests of the keys, so it is not part of the command line, which every process of the machine
can read, nor of the environment, which child processes inherit.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final

from union.sandbox.errors import SandboxUsageError

__all__ = ["MAX_LAUNCH_BYTES", "LaunchSpec"]

MAX_LAUNCH_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One server for one session, without the settings of its command line.

    Attributes:
        session: Name of the session, 32 hexadecimal digits.
        session_arguments: Arguments of the session, as ``PUT /v1/sessions/ID`` accepts them.
        owner_sha256: SHA-256 of the token that may do everything, in hexadecimal.
        guest_sha256: SHA-256 of the token that may use the session, in hexadecimal.
        expires: End of the session, in seconds of Unix time.
        shown_at: Path of the work dir inside the sandbox; None: the same as on the host.
        home: Directory that was created for this server and is removed with it, or None.
        owner_lease: Seconds without a request of the owner until the server ends, and seconds
            until the owner's first request; None: no lease.
        owner_socket: Inherited file descriptor of a connected socket to the owner, or None.
        secrets: Credentials of the server by name, with their values, or None.

    """

    session: str
    session_arguments: dict[str, Any]
    owner_sha256: str
    guest_sha256: str
    expires: float
    shown_at: str | None = None
    home: str | None = None
    owner_lease: tuple[float, float] | None = None
    owner_socket: int | None = None
    secrets: dict[str, Any] | None = field(default=None, repr=False)

    def encode(self) -> bytes:
        """Return the document: one line, with its line end."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> LaunchSpec:
        """Return the specification of one line.

        Raises:
            SandboxUsageError: The line is not JSON, a field is missing, unknown or of the wrong
                type.

        """
        try:
            fields = json.loads(line)
        except ValueError as exc:
            raise _invalid("the launch document is not JSON") from exc
        if not isinstance(fields, dict):
            raise _invalid(f"the launch document is a {type(fields).__name__}, not an object")
        if unknown := fields.keys() - _FIELDS.keys():
            raise _invalid(
                f"the launch document has an unknown field {min(unknown)!r}",
                hint="use the same version of unionai-sandbox on both sides",
            )
        if missing := _REQUIRED - fields.keys():
            raise _invalid(f"the launch document has no field {min(missing)!r}")
        for name, value in fields.items():
            if not _is_valid(name, value):
                raise _invalid(
                    f"field {name!r} of the launch document must be {_FIELDS[name]}, "
                    f"got {type(value).__name__}"
                )
        fields["expires"] = float(fields["expires"])
        if (lease := fields.get("owner_lease")) is not None:
            fields["owner_lease"] = (float(lease[0]), float(lease[1]))
        return cls(**fields)


_FIELDS: Final = {
    "session": "a string",
    "session_arguments": "an object",
    "owner_sha256": "a string",
    "guest_sha256": "a string",
    "expires": "a number",
    "shown_at": "a string or null",
    "home": "a string or null",
    "owner_lease": "two numbers or null",
    "owner_socket": "a whole number or null",
    "secrets": "an object or null",
}
_REQUIRED: Final = frozenset(
    item.name for item in dataclasses.fields(LaunchSpec) if item.default is dataclasses.MISSING
)


def _is_valid(name: str, value: object) -> bool:
    if value is None:
        return name not in _REQUIRED
    match name:
        case "session_arguments" | "secrets":
            return isinstance(value, dict)
        case "expires":
            return _is_number(value)
        case "owner_lease":
            return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        case "owner_socket":
            return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(problem: str, hint: str = "") -> SandboxUsageError:
    return SandboxUsageError(
        f"--supervised: {problem}",
        argument="--supervised",
        hint=hint or "start the server with sandbox.session(), which writes this document",
    )
