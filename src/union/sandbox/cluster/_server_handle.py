"""What an owner has in hand: a server that was started, wherever that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

    from union.sandbox.cluster._keys import Keys

__all__ = ["Found", "Hold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a server is."""

    endpoint: str
    ip: str | None = None


class Hold(Protocol):
    """The owner's side of one run: of a pod, or of a process of this machine."""

    @property
    def keys(self) -> Keys: ...

    @property
    def verifier(self) -> str:
        """The public key of the server's announcement; empty if it makes none."""
        ...

    async def found(self) -> Found:
        """Returns when the server can be addressed; raises why it never will be."""
        ...

    def take_line(self) -> socket.socket | None:
        """A way to the server that needs no HTTP, where there is one; once."""
        ...

    async def end(self) -> None:
        """Ends the run, whatever state it is in; returns when that is certain."""
