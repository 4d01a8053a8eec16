"""The arguments of ``session()``, checked before anything is started."""

from __future__ import annotations

import dataclasses
import re
import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from union.sandbox._core.resolve import resolve_session, settled_timeout
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._core.spec import SessionSpec

__all__ = [
    "BACKENDS",
    "DEFAULT_NAMES",
    "MOST_S",
    "OWNER_LEASE",
    "Request",
    "SandboxMode",
    "request_from",
]

SandboxMode = Literal["userns", "bwrap"]
BACKENDS: Final[dict[str, str]] = {"userns": "userns", "bwrap": "bubblewrap"}
DEFAULT_NAMES: Final[dict[str, str]] = {
    "userns": "union-sandbox",
    "bwrap": "union-sandbox-bwrap",
}
"""The environments that ``unionai-sandbox-deploy`` deploys."""
MOST_S: Final = 24 * 3600.0
OWNER_LEASE: Final = "owner_lease"
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_LEAST_LEASE_S: Final = 1.0
_RESERVE: Final = 128 * 2**20
"""What the server itself needs of a pod's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One session as its owner wants it."""

    name: str
    environment: str
    sandbox_mode: SandboxMode
    overrides_mode: bool = False
    """Whether the environment's own mode is another one."""
    timeout_s: float
    ready_timeout_s: float
    owner_lease_s: float | None = None
    """The run ends when its owner was not heard of for so long; None: it does not."""
    project: str | None = None
    domain: str | None = None
    resources: object = None
    """An override of the environment's; None: as deployed."""
    spec: SessionSpec
    env_vars: dict[str, str] = field(default_factory=dict)
    """What the environment gives to its pods; no pod, and it has to be given here."""

    @property
    def backend(self) -> str:
        return BACKENDS[self.sandbox_mode]

    def session(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What the server is told of the session."""
        # Not needed until a server has been started, which can be under way meanwhile.
        from union.sandbox._core.wire_values import session_to

        told = session_to(self.spec)
        if env:
            told["env"] = {**env, **told.get("env", {})}
        return told


def _wrong(argument: str, value: object, accepted: str) -> SandboxUsageError:
    return SandboxUsageError(f"{argument} must be {accepted}, not {value!r}", argument=argument)


def _mode(value: object) -> SandboxMode:
    if value not in BACKENDS:
        raise _wrong("sandbox_mode", value, "'userns' or 'bwrap'")
    return cast("SandboxMode", value)


def _seconds(argument: str, value: object) -> float:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    settled = settled_timeout(argument, number)
    if settled is None:
        raise _wrong(argument, value, "a timedelta, or a number of seconds")
    return settled


def _text(argument: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _wrong(argument, value, "a name, or None for the configured one")
    return value


def request_from(
    *,
    environment: object,
    name: object,
    timeout: object,
    project: object,
    domain: object,
    resources: object,
    network_mode: object,
    network_allowlist: object,
    network_denylist: object,
    sandbox_mode: object,
    ready_timeout: object,
    owner_lease: object,
) -> Request:
    """Checks every argument of ``session()``; a mistake costs no pod."""
    asked = None if sandbox_mode is None else _mode(sandbox_mode)
    own_mode: SandboxMode | None = None
    own_resources: object = None
    env_vars: dict[str, str] = {}
    if environment is None:
        called = DEFAULT_NAMES[asked or "userns"]
        own_mode = asked or "userns"
    elif isinstance(environment, str) and environment:
        called = environment
    elif hasattr(environment, "sandbox_mode") and hasattr(environment, "task_env"):
        called = str(environment.name)  # type: ignore[attr-defined]  # Flyte is not imported here
        own_mode = environment.sandbox_mode
        own_resources = getattr(environment, "resources", None)
        env_vars = dict(getattr(environment, "env_vars", None) or {})
    else:
        raise _wrong("environment", environment, "a SandboxEnvironment, or the name of one")
    mode = asked or own_mode or "userns"
    if name is None:
        name = f"sbx-{secrets.token_hex(8)}"
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            "name", name, "at most 30 lower-case letters, digits and dashes, a letter first"
        )
    timeout_s = _seconds("timeout", timeout)
    if timeout_s > MOST_S:
        raise _wrong("timeout", timeout, "at most 24 hours")
    lease_s = None if owner_lease is None else _seconds("owner_lease", owner_lease)
    if lease_s is not None and lease_s < _LEAST_LEASE_S:
        raise _wrong("owner_lease", owner_lease, f"{_LEAST_LEASE_S:g} seconds or more, or None")
    spec = resolve_session(
        backend=BACKENDS[mode],
        backends=tuple(BACKENDS.values()),
        network_mode=network_mode,
        network_allowlist=network_allowlist,
        network_denylist=network_denylist,
        resources=own_resources if resources is None else resources,
    )
    return Request(
        name=name,
        environment=called,
        sandbox_mode=mode,
        overrides_mode=own_mode is None or mode != own_mode,
        timeout_s=timeout_s,
        ready_timeout_s=_seconds("ready_timeout", ready_timeout),
        owner_lease_s=lease_s,
        project=_text("project", project),
        domain=_text("domain", domain),
        resources=resources,
        spec=_with_reserve(spec),
        env_vars=env_vars,
    )


def _with_reserve(spec: SessionSpec) -> SessionSpec:
    """A pod that is full is killed as a whole: what runs in it must reach its own limit first."""
    memory = spec.limits.memory_bytes
    if memory is None:
        return spec
    reserve = min(_RESERVE, memory // 4)
    limits = dataclasses.replace(spec.limits, memory_bytes=memory - reserve)
    return dataclasses.replace(spec, limits=limits)
