"""What the intercepted connections of one session share: authority, upstream TLS, budgets."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import weakref
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.scrubber import ScrubTable
from union.sandbox._net.authority import CertificateAuthority
from union.sandbox._policy.credentials import secrets_sent

if TYPE_CHECKING:
    from union.sandbox._policy.http_entries import Http

__all__ = ["Interception", "Spent"]

_MAX_BUFFERED: Final = 4
_UPSTREAM_VARIABLES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_upstream_contexts: dict[tuple[str | None, ...], ssl.SSLContext] = {}
"""TLS contexts for servers, by the variables that select the host's trust store. Reading a store
takes tens of milliseconds."""


class Spent:
    """What has been used of the budgets of one ``Http`` entry, and of the wider one it narrows.

    Args:
        http: the entry.
        wider: the same of the wider entry; None if there is none.

    """

    __slots__ = ("_http", "_wider", "bytes_down", "bytes_up", "requests")

    def __init__(self, http: Http, wider: Spent | None = None) -> None:
        # The entry is the key of the table that holds this object, so it must not be kept alive.
        self._http = weakref.ref(http)
        self._wider = wider
        self.requests = 0
        self.bytes_up = 0
        self.bytes_down = 0

    def exceeded(self, *, requests: int = 0, up: int = 0, down: int = 0) -> str:
        """Return the budget that this much more would exceed; empty if none."""
        http = self._http()
        if http is not None:
            for name, used, limit in (
                ("max_requests", self.requests + requests, http.max_requests),
                ("max_bytes_up", self.bytes_up + up, http.max_bytes_up),
                ("max_bytes_down", self.bytes_down + down, http.max_bytes_down),
            ):
                if limit is not None and used > limit:
                    return f"budget of {http.text} used up: {name}={limit}"
        if self._wider is None:
            return ""
        return self._wider.exceeded(requests=requests, up=up, down=down)

    def add(self, *, requests: int = 0, up: int = 0, down: int = 0) -> None:
        """Count a use."""
        self.requests += requests
        self.bytes_up += up
        self.bytes_down += down
        if self._wider is not None:
            self._wider.add(requests=requests, up=up, down=down)


class Interception:
    """The authority and the budgets of one session. Made at no cost; ``prepare`` fills it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._authority: CertificateAuthority | None = None
        self.buffering = asyncio.Semaphore(_MAX_BUFFERED)
        """Held while a request body is in memory, so that a program cannot fill the host's."""
        self._spent: weakref.WeakKeyDictionary[Http, Spent] = weakref.WeakKeyDictionary()
        self._tables: weakref.WeakKeyDictionary[Http, ScrubTable] = weakref.WeakKeyDictionary()

    @property
    def is_prepared(self) -> bool:
        """Whether ``prepare`` was called."""
        return self._authority is not None

    def prepare(self) -> CertificateAuthority:
        """Make the authority and read the host's trust store. Takes a while: call it in a thread.

        Raises:
            MissingExtraError: the package ``cryptography`` is not installed.

        """
        with self._lock:
            if self._authority is None:
                authority = CertificateAuthority()
                upstream_context()
                self._authority = authority
            return self._authority

    def server_context(self, host: str) -> ssl.SSLContext:
        """Return the TLS context towards clients of ``host``."""
        return self.prepare().context(host)

    def spent(self, http: Http) -> Spent:
        """Return what this session has used of the budgets of an entry."""
        found = self._spent.get(http)
        if found is None:
            wider = None if http.within is None else self.spent(http.within)
            found = self._spent[http] = Spent(http, wider)
        return found

    def scrub_table(self, http: Http) -> ScrubTable | None:
        """Return the secrets to replace in responses; None if there are none."""
        secrets = () if http.auth is None else secrets_sent(http.auth)
        if not http.scrub or not secrets:
            return None
        table = self._tables.get(http)
        if table is None:
            table = ScrubTable(
                tuple((s.reveal().encode(), s.placeholder.encode()) for s in secrets)
            )
            self._tables[http] = table
        return table


def upstream_context() -> ssl.SSLContext:
    """Return the TLS context towards servers: the host's trust store, HTTP/1.1."""
    key = tuple(os.environ.get(name) for name in _UPSTREAM_VARIABLES)
    context = _upstream_contexts.get(key)
    if context is None:
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _upstream_contexts[key] = context
    return context
