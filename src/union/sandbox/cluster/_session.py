"""SandboxSession: a session in a run of its own, which can be passed to other tasks."""

from __future__ import annotations

import dataclasses
from datetime import datetime  # noqa: TC003 - the annotations are resolved below
from typing import TYPE_CHECKING, Any, get_type_hints

from union.sandbox._core.resolve import resolve_session
from union.sandbox._session.session import Session
from union.sandbox.cluster._keys import session_name
from union.sandbox.cluster._lifecycle import ClusterLifecycle
from union.sandbox.cluster._request import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox.cluster._server_handle import ServerHandle

__all__ = ["SandboxSession"]


def _rebuild(cls: type[SandboxSession], fields: dict[str, Any]) -> SandboxSession:
    return cls(**fields)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class SandboxSession(Session):
    """A live sandbox in a run of its own, made by ``await session(...)``.

    ``async with sbx``, ``await sbx`` or ``await sbx.open()`` waits until it can be addressed, and
    may be repeated; the first call connects. The process that made it is its *owner*: leaving the
    block, or ``close()``, ends the run. It can be passed to other tasks, pickled and copied: the
    receiver gets a *reference*, which runs commands and moves files, and whose ``close()`` ends
    only the commands that it has started.

    A reference carries a token for this one session, valid until ``expires_at``. The token is
    stored wherever the inputs of those tasks are stored.
    """

    name: str
    """The name of the run."""
    created_at: datetime
    """When the run was submitted."""
    expires_at: datetime
    """When the run ends at the latest."""
    endpoint: str = ""
    """The endpoint of the server; empty until the server is found."""
    ip: str | None = None
    """The address of the pod, once it is found; None for a process of this machine."""
    url: str | None = None
    """The run's page in the console; None without a cluster."""
    project: str | None = None
    """The project of the run; None if there is none."""
    domain: str | None = None
    """The domain of the run; None if there is none."""
    environment: str = ""
    """The name of the `SandboxEnvironment` of the run."""
    sandbox_mode: str = "userns"
    """The backend of the sandboxes: ``userns``, ``bwrap`` or ``landlock``."""
    network_mode: str | None = None
    """The default and the ceiling of every call; None: blocked unless a call requests more."""
    network_allowlist: list[str] | None = None
    """The entries of ``network_mode="allowlist"``; None without that mode."""
    network_denylist: list[str] | None = None
    """Entries that are refused in every mode; None for none."""
    host_work_dir: str | None = None
    """The work dir, if the owner has chosen one."""
    access: str = ""
    """The guest's token. The owner's token is in no field."""
    verifier: str = ""
    """The public key that verifies the server's announcement; it cannot sign one."""

    def __post_init__(self) -> None:
        spec = resolve_session(
            backend=BACKENDS.get(self.sandbox_mode, self.sandbox_mode),
            backends=tuple(BACKENDS.values()),
            network_mode=self.network_mode,
            network_allowlist=self.network_allowlist,
            network_denylist=self.network_denylist,
        )
        self._handle: ServerHandle | None = None
        super().__init__(spec, ClusterLifecycle(self, spec), session_name(self.name))

    def _become_owner(self, handle: ServerHandle) -> None:
        """Make this the owner of a run that was just started."""
        self._handle = handle
        self.access = handle.keys.guest

    # Passing it on.

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __reduce__(self) -> tuple[Callable[..., SandboxSession], tuple[Any, ...]]:
        return _rebuild, (type(self), self._fields())

    def __repr__(self) -> str:
        role = "owner" if self.is_owner else "reference"
        return f"<SandboxSession {self.name} {role} at {self.endpoint or 'an unknown endpoint'}>"

    @property
    def is_owner(self) -> bool:
        """Whether this object started the run, and ends it."""
        return self._handle is not None


# The class reports its public module, in which these annotations cannot be resolved.
SandboxSession.__annotations__ = get_type_hints(SandboxSession)
for _field in dataclasses.fields(SandboxSession):
    _field.type = SandboxSession.__annotations__[_field.name]
