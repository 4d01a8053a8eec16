"""Credentials that a server owns: the operator's description, and the entries of its clients."""

from __future__ import annotations

from dataclasses import dataclass
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
from union.sandbox._policy.http_entries import Http, covers
from union.sandbox._policy.secret import Secret
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ROLES", "StoredSecret", "parse_stored", "resolve_stored"]

ROLES: Final = ("owner", "capability", "guest")
"""The kinds of tokens that can run commands in a session."""
_LIMITS: Final = ("max_requests", "max_bytes_up", "max_bytes_down")
_FIELDS: Final = frozenset(
    {
        "host", "value", "auth", "name", "prefix", "username", "access_key", "allow", "websockets",
        "roles", *_LIMITS,
    }
)  # fmt: skip
_OF_AUTH: Final = {
    "bearer": frozenset(),
    "header": frozenset({"name", "prefix"}),
    "basic": frozenset({"username"}),
    "query": frozenset({"name"}),
    "sigv4": frozenset({"access_key"}),
}
_EXAMPLE: Final = 'openai = {host = "api.openai.com", auth = "bearer", value = "..."}'


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """One credential of a server.

    Attributes:
        name: the name that clients use.
        http: the widest entry that a client may have with it.
        roles: the tokens that may use it.

    """

    name: str
    http: Http
    roles: frozenset[str]


def parse_stored(table: Mapping[str, Any], *, argument: str) -> dict[str, StoredSecret]:
    """Parse the credentials of a server.

    Args:
        table: for each name: ``host``, ``value``, ``auth`` (``"bearer"`` by default, ``"header"``,
            ``"basic"``, ``"query"`` or ``"sigv4"``) with its ``name``, ``prefix``, ``username`` or
            ``access_key``, and optionally ``allow``, ``max_requests``, ``max_bytes_up``,
            ``max_bytes_down``, ``websockets`` and ``roles``.
        argument: the setting that has it, for errors.

    Raises:
        PolicyError: a description is invalid; the message contains no value.

    """
    return {name: _parse(name, fields, argument) for name, fields in table.items()}


def _parse(name: str, fields: object, argument: str) -> StoredSecret:
    where = f"{argument}: {name!r:.120}"

    def refused(why: str) -> PolicyError:
        return PolicyError(f"{where} {why}", argument=argument, hint=_EXAMPLE)

    ServerSecret(name)  # the same rule for names
    if not isinstance(fields, dict):
        raise refused(f"must be a table, got {type(fields).__name__}")
    if unknown := fields.keys() - _FIELDS:
        raise refused(f"has an unknown field {min(unknown, key=str)!r:.100}")
    if not isinstance(fields.get("host"), str):
        raise refused("must name the one host that its value is sent to")
    if not isinstance(fields.get("value"), str):
        raise refused("has no value")
    roles = fields.get("roles", ["owner"])
    if not isinstance(roles, list) or not roles or not all(role in ROLES for role in roles):
        raise refused(f"has roles that are not a list of {', '.join(ROLES)}")
    try:
        http = Http(
            fields["host"],
            auth=_auth(fields, refused_fields=refused),
            allow=fields.get("allow"),
            websockets=fields.get("websockets", False),
            max_requests=fields.get("max_requests"),
            max_bytes_up=fields.get("max_bytes_up"),
            max_bytes_down=fields.get("max_bytes_down"),
        )
    except PolicyError as exc:
        raise refused(f"is invalid: {exc.args[0]}") from None
    http.is_stored = True
    return StoredSecret(name, http, frozenset(roles))


def _auth(fields: dict[str, Any], *, refused_fields: Any) -> Auth:
    kind = fields.get("auth", "bearer")
    if kind not in _OF_AUTH:
        raise refused_fields(f"has an unknown auth {kind!r:.100}; accepted: {', '.join(_OF_AUTH)}")
    given = {name: fields[name] for name in _OF_AUTH[kind] if name in fields}
    other = frozenset().union(*_OF_AUTH.values()) & fields.keys() - _OF_AUTH[kind]
    if other:
        raise refused_fields(f"has {min(other)!r}, which auth {kind!r} does not use")
    if missing := _OF_AUTH[kind] - given.keys() - {"prefix"}:
        raise refused_fields(f"has auth {kind!r} and no {min(missing)!r}")
    secret = Secret(fields["value"])
    match kind:
        case "bearer":
            return Bearer(secret)
        case "header":
            return Header(given["name"], secret, given.get("prefix", ""))
        case "basic":
            return Basic(given["username"], secret)
        case "query":
            return Query(given["name"], secret)
        case _:
            return SigV4(given["access_key"], secret)


def resolve_stored(http: Http, stored: Mapping[str, StoredSecret], role: str) -> Http:
    """Return a client's entry with the credential of the server that it names.

    Args:
        http: the entry of the client; returned as it is if it names none.
        stored: the credentials of the server.
        role: the kind of the client's token.

    Raises:
        PolicyError: code ``server-secret``; there is no such credential for this token, or the
            entry allows more than the operator does.

    """
    if not isinstance(http.auth, ServerSecret):
        return http
    known = stored.get(http.auth.name)
    if known is None or role not in known.roles:
        # One text for both, so that a token learns no name that it may not use.
        raise PolicyError(
            f"network_allowlist: the server has no secret {http.auth.name!r} for this token",
            argument="network_allowlist",
            code="server-secret",
            hint="the operator adds it with sandbox-server --secrets FILE, and lists the kind of "
            "token in its roles",
        )
    wide = known.http
    narrow = Http(
        http.place,
        auth=wide.auth,
        allow=wide.allow if http.allow is None else http.allow,
        env=http.env,
        max_requests=_lower(http.max_requests, wide.max_requests),
        max_bytes_up=_lower(http.max_bytes_up, wide.max_bytes_up),
        max_bytes_down=_lower(http.max_bytes_down, wide.max_bytes_down),
        scrub=http.scrub,
        websockets=http.websockets,
    )
    if not covers(wide, narrow):
        raise PolicyError(
            f"network_allowlist: {http.text} with ServerSecret({http.auth.name!r}) allows more "
            "than the operator of the server does",
            argument="network_allowlist",
            code="server-secret",
            hint=f"use {wide.text}, with rules that are among those of the operator: "
            + ("every request" if wide.allow is None else ", ".join(wide.allow) or "none"),
        )
    narrow.is_stored = True
    narrow.within = wide
    return narrow


def _lower(requested: int | None, ceiling: int | None) -> int | None:
    if requested is None or ceiling is None:
        return ceiling if requested is None else requested
    return min(requested, ceiling)
