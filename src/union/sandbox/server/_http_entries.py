"""``Http`` entries of the clients of one session: their secrets, kept in memory, never returned."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._policy.http_entries import Http, covers
from union.sandbox._policy.stored_secrets import resolve_stored
from union.sandbox._wire.frames import WireError
from union.sandbox._wire.http_values import (
    MAX_ENTRIES,
    check_identifier,
    decode_entry,
    decode_secret,
    split_secrets,
)
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._policy.secret import Secret
    from union.sandbox._policy.stored_secrets import StoredSecret
    from union.sandbox.server._auth import Grant

__all__ = ["SessionEntries"]

_MAX_KEPT: Final = 256
"""Secrets, and entries, that are kept for one token; the least recently used is dropped."""
_MAX_TOKENS: Final = 64


class _Kept:
    """The secrets and entries of one token."""

    def __init__(self) -> None:
        self.secrets: OrderedDict[str, Secret] = OrderedDict()
        self.entries: OrderedDict[str, tuple[dict[str, Any], Http]] = OrderedDict()


class SessionEntries:
    """Resolves the entries that clients of one session send.

    Secrets and entries of one token are unknown to the others.

    Args:
        stored: the credentials of the server.

    """

    def __init__(self, stored: Mapping[str, StoredSecret]) -> None:
        self._stored = stored
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def resolve(
        self,
        fields: dict[str, Any],
        grant: Grant,
        *,
        is_private: bool,
        ceiling: NetworkSpec | None = None,
    ) -> dict[str, Any]:
        """Return the fields with ``Http`` objects in the allow-list, and without ``secrets``.

        Args:
            fields: the arguments of a session, a run or a cell.
            grant: the rights of the client.
            is_private: whether no third party can read the connection.
            ceiling: the network of the session, if it limits its calls. Default None.

        Raises:
            WireError: an entry or a secret is malformed.
            PolicyError: an entry is refused. Code ``secret-dropped``: the client must send a
                value again. Code ``unencrypted``: a value was sent in the clear.

        """
        items = fields.get("network_allowlist")
        sent = fields.get("secrets")
        has_entries = isinstance(items, list) and any(isinstance(item, dict) for item in items)
        if sent is None and not has_entries:
            return fields
        kept = self._of(grant.key)
        if sent is not None:
            self._keep(kept, split_secrets(sent), is_private=is_private)
        fields = {name: value for name, value in fields.items() if name != "secrets"}
        if has_entries:
            entries = [item for item in items or () if isinstance(item, dict)]
            if len(entries) > MAX_ENTRIES:
                raise WireError(f"a list has at most {MAX_ENTRIES} Http entries")
            fields["network_allowlist"] = [
                self._entry(kept, item, grant, ceiling) if isinstance(item, dict) else item
                for item in items or ()
            ]
        return fields

    def _of(self, key: str) -> _Kept:
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        if len(self._kept) > _MAX_TOKENS:
            self._kept.popitem(last=False)
        return kept

    def _keep(self, kept: _Kept, sent: dict[str, Any], *, is_private: bool) -> None:
        if sent and not is_private:
            raise PolicyError(
                "network_allowlist: this server accepts secrets over TLS, a Unix socket or "
                "loopback only",
                argument="network_allowlist",
                code="unencrypted",
                hint="start it with --tls-cert or --tls-self-signed, or store the secret there: "
                "--secrets FILE",
            )
        for identifier, payload in sent.items():
            if identifier not in kept.secrets:
                kept.secrets[identifier] = decode_secret(payload)
            kept.secrets.move_to_end(identifier)
        while len(kept.secrets) > _MAX_KEPT:
            kept.secrets.popitem(last=False)

    def _entry(
        self, kept: _Kept, payload: dict[str, Any], grant: Grant, ceiling: NetworkSpec | None
    ) -> Http:
        identifier = check_identifier(payload.get("id"))
        known = kept.entries.get(identifier)
        if known is not None and known[0] == payload:
            kept.entries.move_to_end(identifier)
            return known[1]

        def find(name: str) -> Secret:
            secret = kept.secrets.get(name)
            if secret is None:
                raise PolicyError(
                    "network_allowlist: the server no longer has a secret of this call",
                    argument="network_allowlist",
                    code="secret-dropped",
                    hint="send it again",
                )
            kept.secrets.move_to_end(name)
            return secret

        http = resolve_stored(decode_entry(payload, find), self._stored, grant.role)
        for entry in () if ceiling is None else ceiling.allow:
            # A narrower entry counts against the budgets of the session's too.
            if entry.http is not None and covers(entry.http, http):
                http.within = entry.http
        kept.entries[identifier] = (payload, http)
        if len(kept.entries) > _MAX_KEPT:
            kept.entries.popitem(last=False)
        return http
