"""Wait until a server accepts sessions, and check that it uses the same protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.frames import VERSION
from union.sandbox.errors import SandboxConnectionError
from union.sandbox.remote._connection import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox.remote._http import HttpClient

__all__ = ["check_health", "protocol_error"]

_MIN_HEALTH_S: Final = 1.0


async def check_health(
    http: HttpClient, within_s: float, is_gone: Callable[[SandboxConnectionError], bool]
) -> None:
    """Wait for a server that is starting or busy, but not for one that refuses.

    Args:
        http: the client of the server.
        within_s: how long to wait, in seconds.
        is_gone: whether an error means that no server will ever reply at this address.

    """
    backoff = Backoff(within_s)
    payload: dict[str, Any] = {}
    while payload.get("status") != "ok":
        try:
            left_s = max(backoff.left_s, _MIN_HEALTH_S)
            payload = await http.call("GET", "health", within_s=left_s)
            status = payload.get("status")
            problem = SandboxConnectionError(
                f"{http.endpoint}: the server is {status!r:.100}", code="draining"
            )
        except SandboxConnectionError as exc:
            if exc.code in {"unauthorized", "certificate", "protocol"} or is_gone(exc):
                raise
            problem = exc
        if payload.get("status") != "ok" and not await backoff.wait():
            raise problem
    version = payload.get("protocol")
    if version != VERSION:
        raise SandboxConnectionError(
            f"{http.endpoint}: the server uses version {version!r:.100} of the protocol, this "
            f"client version {VERSION}",
            code="version",
            hint="use the same version of unionai-sandbox on both sides",
        )


def protocol_error(endpoint: str, why: object) -> SandboxConnectionError:
    """Return the error for a reply that no server of ours sends."""
    return SandboxConnectionError(
        f"{endpoint}: the reply violates the protocol: {why}",
        endpoint=endpoint,
        sent=True,
        code="protocol",
        hint="the server is faulty or hostile: do not use it",
    )
