"""``Http`` entries of a session on a server: secrets are sent once, entries name them."""

from __future__ import annotations

import secrets
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from union.sandbox._wire.http_values import encode_entry, encode_secret
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._policy.entries import Entry
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.secret import Secret
    from union.sandbox._wire.endpoint import Endpoint

__all__ = ["SentEntries"]

_T = TypeVar("_T")


class SentEntries:
    """Encodes the allow-lists of one session (the EntryEncoder protocol).

    A value is sent until the server has started a command with it, and then never again: what was
    sent and not confirmed may have been lost.

    Args:
        endpoint: the address of the server.

    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._entries: weakref.WeakKeyDictionary[Http, str] = weakref.WeakKeyDictionary()
        self._secrets: weakref.WeakKeyDictionary[Secret, str] = weakref.WeakKeyDictionary()
        self._confirmed: weakref.WeakSet[Secret] = weakref.WeakSet()
        self._used: list[Secret] = []

    def encode(self, allow: tuple[Entry, ...], /) -> dict[str, Any]:
        """Encode an allow-list, and the secrets that the server does not have yet.

        Raises:
            PolicyError: code ``unencrypted``; a value would be sent in the clear.

        """
        self.check(allow)
        self._used = []
        items = [entry.text if entry.http is None else self._entry(entry.http) for entry in allow]
        payload: dict[str, Any] = {"network_allowlist": items}
        missing = [secret for secret in self._used if secret not in self._confirmed]
        if missing:
            payload["secrets"] = {self._secrets[s]: encode_secret(s) for s in missing}
        return payload

    def check(self, allow: tuple[Entry, ...]) -> None:
        """Raise ``PolicyError`` if a value of this allow-list would be sent in the clear."""
        self._note(allow)
        if any(secret not in self._confirmed for secret in self._used):
            self._check_encrypted()

    def confirm(self, allow: tuple[Entry, ...]) -> None:
        """Record that the server has the secrets of this allow-list."""
        self._note(allow)
        self._confirmed.update(self._used)

    def _note(self, allow: tuple[Entry, ...]) -> None:
        self._used = []
        for entry in allow:
            if entry.http is not None:
                self._entry(entry.http)

    async def deliver(self, allow: tuple[Entry, ...], send: Callable[[], Awaitable[_T]]) -> _T:
        """Send a command; send it again with its secrets if the server has dropped one."""
        try:
            found = await send()
        except PolicyError as exc:
            if exc.code != "secret-dropped":
                raise
            self.forget()
            found = await send()
        self.confirm(allow)
        return found

    def forget(self) -> None:
        """Send every value again: the server has dropped one."""
        self._confirmed.clear()

    def _entry(self, http: Http) -> dict[str, Any]:
        identifier = self._entries.setdefault(http, secrets.token_hex(16))
        return encode_entry(http, identifier, self._name_of)

    def _name_of(self, secret: Secret) -> str:
        self._used.append(secret)
        return self._secrets.setdefault(secret, secrets.token_hex(16))

    def _check_encrypted(self) -> None:
        if self._endpoint.is_secure:
            return
        raise PolicyError(
            f"network_allowlist: a secret is not sent to {self._endpoint}, because the connection "
            "is not encrypted",
            argument="network_allowlist",
            code="unencrypted",
            hint="use https:// (sandbox-server --tls-cert or --tls-self-signed) or unix://, or "
            "store the secret on the server: sandbox-server --secrets FILE, and sb.ServerSecret",
        )
