"""Encode ``Http`` entries and secrets for the wire, and decode them strictly.

The value of a secret is sent once, under an identifier that the client chooses. Each entry names
its secret by that identifier. No message of a server contains a value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._policy.credentials import (
    Auth,
    Basic,
    Bearer,
    Header,
    Query,
    ServerSecret,
    SigV4,
)
from union.sandbox._policy.http_entries import Http
from union.sandbox._policy.secret import Secret
from union.sandbox._wire.frames import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_ENTRIES",
    "check_identifier",
    "decode_entry",
    "decode_secret",
    "encode_entry",
    "encode_secret",
    "split_secrets",
]

MAX_ENTRIES: Final = 256
"""The most ``Http`` entries, and the most secrets, of one message."""
_MAX_RULES: Final = 1024
_MAX_LIMIT: Final = 2**63
_IDENTIFIER: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ENTRY: Final = frozenset(
    {
        "id", "host", "auth", "allow", "env", "max_requests", "max_bytes_up", "max_bytes_down",
        "scrub", "websockets",
    }
)  # fmt: skip
_AUTHS: Final[dict[str, Callable[..., Auth]]] = {
    "bearer": Bearer, "header": Header, "basic": Basic, "query": Query, "sigv4": SigV4,
    "server": ServerSecret,
}  # fmt: skip
_AUTH_FIELDS: Final = {
    "bearer": frozenset({"secret"}),
    "header": frozenset({"secret", "name", "prefix"}),
    "basic": frozenset({"secret", "username"}),
    "query": frozenset({"secret", "name"}),
    "sigv4": frozenset({"secret", "access_key", "session_token"}),
    "server": frozenset({"name"}),
}


def encode_secret(secret: Secret) -> dict[str, str]:
    """Encode a secret with its value."""
    return {"value": secret.reveal(), "placeholder": secret.placeholder}


def decode_secret(payload: object) -> Secret:
    """Decode a secret.

    Raises:
        WireError: the fields are malformed; the message contains no value.
        PolicyError: ``Secret()`` raises it for the same value.

    """
    if not isinstance(payload, dict) or payload.keys() != {"value", "placeholder"}:
        raise WireError("a secret must have the fields value and placeholder, and no others")
    for name in ("value", "placeholder"):
        if not isinstance(payload[name], str):
            raise WireError(f"{name} of a secret must be a string")
    try:
        return Secret(payload["value"], placeholder=payload["placeholder"])
    except UnicodeError as exc:
        raise WireError("the placeholder of a secret cannot be encoded as UTF-8") from exc


def split_secrets(payload: object) -> dict[str, Any]:
    """Check the table of secrets of a message; return its items, not decoded yet.

    Raises:
        WireError: it is malformed.

    """
    if not isinstance(payload, dict):
        raise WireError(f"secrets must be an object, got {type(payload).__name__}")
    if len(payload) > MAX_ENTRIES:
        raise WireError(f"a message has at most {MAX_ENTRIES} secrets, got {len(payload)}")
    for identifier in payload:
        check_identifier(identifier)
    return payload


def check_identifier(value: object) -> str:
    """Return an identifier of an entry or a secret.

    Raises:
        WireError: it is malformed.

    """
    if not isinstance(value, str) or _IDENTIFIER.fullmatch(value) is None:
        raise WireError("an identifier must be 32 hexadecimal digits")
    return value


def encode_entry(http: Http, identifier: str, name_of: Callable[[Secret], str]) -> dict[str, Any]:
    """Encode an entry without the value of its secret.

    Args:
        http: the entry.
        identifier: its identifier; budgets count per identifier.
        name_of: returns the identifier of a secret.

    """
    payload = {
        "id": identifier,
        "host": http.place,
        "auth": None if http.auth is None else _encode_auth(http.auth, name_of),
        "allow": None if http.allow is None else list(http.allow),
        "env": http.env,
        "max_requests": http.max_requests,
        "max_bytes_up": http.max_bytes_up,
        "max_bytes_down": http.max_bytes_down,
        "scrub": None if http.scrub else False,
        "websockets": http.websockets or None,
    }
    return {name: value for name, value in payload.items() if value is not None}


def _encode_auth(auth: Auth, name_of: Callable[[Secret], str]) -> dict[str, Any]:
    kind = next(kind for kind, made in _AUTHS.items() if made is type(auth))
    found = {name: getattr(auth, name) for name in _AUTH_FIELDS[kind]}
    return {"kind": kind} | {
        name: name_of(value) if isinstance(value, Secret) else value
        for name, value in sorted(found.items())
        if value is not None
    }


def decode_entry(payload: dict[str, Any], find_secret: Callable[[str], Secret]) -> Http:
    """Decode an entry; ``ServerSecret`` is not resolved.

    Args:
        payload: the fields.
        find_secret: returns the secret of an identifier, or raises.

    Raises:
        WireError: a field is malformed.
        PolicyError: ``Http()`` raises it for the same arguments.

    """
    if unknown := payload.keys() - _ENTRY:
        raise WireError(f"an Http entry has no field {min(unknown, key=str)!r:.100}")
    check_identifier(payload.get("id"))
    host = payload.get("host")
    if not isinstance(host, str) or len(host) > 300:
        raise WireError("host of an Http entry must be a string of at most 300 characters")
    rules = payload.get("allow")
    if rules is not None and (not isinstance(rules, list) or len(rules) > _MAX_RULES):
        raise WireError(f"allow of an Http entry must be a list of at most {_MAX_RULES} rules")
    for name in ("max_requests", "max_bytes_up", "max_bytes_down"):
        limit = payload.get(name)
        if limit is not None and (type(limit) is not int or not 0 <= limit <= _MAX_LIMIT):
            raise WireError(f"{name} must be a whole number from 0 to {_MAX_LIMIT}")
    auth = payload.get("auth")
    return Http(
        host,
        auth=None if auth is None else _decode_auth(auth, find_secret),
        allow=rules,
        env=payload.get("env"),
        max_requests=payload.get("max_requests"),
        max_bytes_up=payload.get("max_bytes_up"),
        max_bytes_down=payload.get("max_bytes_down"),
        scrub=payload.get("scrub", True),
        websockets=payload.get("websockets", False),
    )


def _decode_auth(payload: object, find_secret: Callable[[str], Secret]) -> Auth:
    if not isinstance(payload, dict) or not isinstance(kind := payload.get("kind"), str):
        raise WireError("auth of an Http entry must be an object with a kind")
    known = _AUTH_FIELDS.get(kind)
    if known is None:
        raise WireError(f"kind of auth must be {', '.join(_AUTH_FIELDS)}, got {kind!r:.100}")
    fields = {name: value for name, value in payload.items() if name != "kind"}
    if unknown := fields.keys() - known:
        raise WireError(f"auth of kind {kind} has no field {min(unknown, key=str)!r:.100}")
    if not all(isinstance(value, str) for value in fields.values()):
        raise WireError("the fields of auth must be strings")
    for name in ("secret", "session_token"):
        if name in fields:
            fields[name] = find_secret(check_identifier(fields[name]))
    try:
        return _AUTHS[kind](**fields)
    except TypeError as exc:
        raise WireError(f"auth of kind {kind} lacks a field") from exc
