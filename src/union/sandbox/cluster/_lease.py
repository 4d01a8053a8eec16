"""Renews the lease of a session, so that its run ends soon after its owner has crashed."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._wire.endpoint import Endpoint

__all__ = ["LeaseRenewal"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_RENEWALS: Final = 3
"""How often a lease is renewed in each of its periods."""


class LeaseRenewal:
    """Renews the lease of one session from a thread, until ``stop()`` or the end of the process.

    A thread, because code that blocks the event loop of the owner must not cost it the session. Any
    request of the owner renews the lease.
    """

    def __init__(self, endpoint: Endpoint, *, token: str, path: str, lease_s: float) -> None:
        self._endpoint, self._token, self._path = endpoint, token, path
        self._every_s = lease_s / _RENEWALS
        self._stopped = threading.Event()
        thread = threading.Thread(target=self._run, name="union-sandbox-lease", daemon=True)
        thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                asyncio.run(self._renew())
            except (SandboxError, TimeoutError, OSError) as exc:
                _LOGGER.debug("the lease of %s was not renewed: %s", self._path, exc)

    async def _renew(self) -> None:
        from union.sandbox.remote._http import HttpClient

        http = HttpClient(self._endpoint, token=self._token, ca=None)
        try:
            async with asyncio.timeout(self._every_s):
                await http.call("GET", self._path)
        finally:
            await http.close()
