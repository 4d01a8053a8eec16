"""The owner's handle of a server that was started, in a pod or as a local process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

    from union.sandbox.cluster._keys import Keys

__all__ = ["ServerAddress", "ServerHandle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server."""

    endpoint: str
    ip: str | None = None


class ServerHandle(Protocol):
    """The owner's handle of one run: of a pod, or of a process of this machine."""

    @property
    def keys(self) -> Keys: ...

    @property
    def verifier(self) -> str:
        """The public key of the server's announcement; empty if it makes none."""
        ...

    async def wait_ready(self) -> ServerAddress:
        """Wait until the server can be addressed; raise if it never can."""
        ...

    def take_socket(self) -> socket.socket | None:
        """Return a connected socket to the server, the first time and if there is one."""
        ...

    async def end(self) -> None:
        """End the run, whatever its state; return when it has ended."""
