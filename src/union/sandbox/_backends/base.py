"""What a backend is: a name, and a pure function from what is wanted to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._plan.plan import Plan, Step
    from union.sandbox._plan.rootfs import View

__all__ = ["Backend", "Identity", "NetworkShape", "Setting", "Wrapper"]

NetworkShape = Literal["blocked", "filtered", "open"]
"""Loopback only; a namespace whose only ways out are proxy listeners; the host's own network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who the sandboxed code is, inside and on the host."""

    uid: int
    gid: int
    host_uid: int
    host_gid: int
    kind: str
    """``unprivileged``, ``caller`` or ``host``; see Isolation."""
    deny_setgroups: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Another program that builds the sandbox, and from where it starts."""

    program: str
    way: Literal["caller", "entered", "nested"]
    """As the caller itself; as root, entering a user namespace that the launcher made for it; or,
    for root that may not do that, as an ordinary user of such a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything a plan depends on that is not the backend's own choice."""

    view: View
    identity: Identity
    network: NetworkShape
    network_steps: tuple[Step, ...]
    egress: str
    """What enforces the network policy; see Isolation."""
    landlock_abi: int
    seccomp: bytes
    wrapper: Wrapper | None = None
    share: bool = True
    """Whether sandboxes may begin with a copy of what was built once."""


class Backend(Protocol):
    """One mechanism of isolation."""

    @property
    def name(self) -> str: ...

    def plan(self, setting: Setting) -> Plan:
        """What the launcher does for one sandbox; pure."""
        ...

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        """What that plan enforces."""
        ...
