"""The interface of a backend: a name, and a pure function from a setting to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from union.sandbox._plan.adaptation import LINUX, KernelFeatures

if TYPE_CHECKING:
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._plan.plan import Plan, Step
    from union.sandbox._plan.rootfs import View

__all__ = ["Backend", "Identity", "NetworkShape", "Setting", "Wrapper"]

NetworkShape = Literal["blocked", "filtered", "open"]
"""Loopback only; a namespace whose only ways out are our listeners; the host's own network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The user and group ids of sandboxed code, inside and on the host."""

    uid: int
    gid: int
    host_uid: int
    host_gid: int
    kind: str
    """``unprivileged``, ``caller`` or ``host``; see Isolation."""
    deny_setgroups: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Another program that builds the sandbox, and how it is started."""

    program: str
    mode: Literal["caller", "entered", "nested"]
    """As the caller itself; as root, entering a user namespace that the launcher created; or, for
    root that may not do that, as an ordinary user of such a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The inputs of a plan that the backend does not choose itself."""

    view: View
    identity: Identity
    network: NetworkShape
    network_steps: tuple[Step, ...]
    egress: str
    """The mechanism that enforces the network policy; see Isolation."""
    landlock_abi: int
    seccomp: bytes
    mediated: bytes = b""
    """The second filter, of a backend without namespaces."""
    wrapper: Wrapper | None = None
    share: bool = True
    """Whether sandboxes may start from a copy of a shared part that was built once."""
    kernel: KernelFeatures = LINUX


class Backend(Protocol):
    """One isolation mechanism."""

    @property
    def name(self) -> str: ...

    def plan(self, setting: Setting) -> Plan:
        """Return the steps that the launcher performs for one sandbox; pure."""
        ...

    def isolation(self, setting: Setting, *, limits: tuple[tuple[str, str], ...]) -> Isolation:
        """Return the report of what that plan enforces."""
        ...
