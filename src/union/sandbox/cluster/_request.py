"""The arguments of ``session()``, checked before anything is started."""

from __future__ import annotations

import dataclasses
import re
import secrets
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from union.sandbox._core.resolve import resolve_session, validate_timeout
from union.sandbox._policy.http_entries import texts_of
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._core.spec import SessionSpec

__all__ = [
    "ATTACH_SALT",
    "BACKENDS",
    "DEFAULT_NAMES",
    "MAX_TIMEOUT_S",
    "OWNER_LEASE",
    "Request",
    "SandboxMode",
    "check_name",
    "mode_of",
    "resolve_request",
    "seconds",
]

SandboxMode = Literal["userns", "bwrap", "landlock"]
BACKENDS: Final[dict[str, str]] = {
    "userns": "userns",
    "bwrap": "bubblewrap",
    "landlock": "landlock",
}
_MODES: Final = {
    "userns": "userns",
    "bubblewrap": "bwrap",
    "bwrap": "bwrap",
    "landlock": "landlock",
}
DEFAULT_NAMES: Final[dict[str, str]] = {
    "userns": "union-sandbox",
    "bwrap": "union-sandbox-bwrap",
}
"""The environments that ``unionai-sandbox-deploy`` deploys."""
MAX_TIMEOUT_S: Final = 24 * 3600.0
OWNER_LEASE: Final = "owner_lease"
ATTACH_SALT: Final = "attach_salt"
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_MIN_LEASE_S: Final = 1.0
_RESERVE: Final = 128 * 2**20
"""The share of a pod's memory that the server itself needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The checked arguments of one ``session()`` call."""

    name: str
    environment: str
    sandbox_mode: SandboxMode
    overrides_mode: bool = False
    """Whether ``sandbox_mode`` differs from the environment's own."""
    timeout_s: float
    ready_timeout_s: float
    owner_lease_s: float | None = None
    """The run ends when its owner sends no request for this long; None: no lease."""
    project: str | None = None
    domain: str | None = None
    service_account: str | None = None
    runtime: str = "container"
    """The runtime of the environment; empty for a name that this process has not declared."""
    resources: object = None
    """Replaces the resources of the environment; None: as deployed."""
    spec: SessionSpec
    env_vars: dict[str, str] = field(default_factory=dict)
    """The variables that the environment sets in its pods; used where there is no pod."""
    credentials: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The credentials of the environment, without values; used where there is no pod."""

    @property
    def backend(self) -> str:
        return BACKENDS[self.sandbox_mode]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the server's machine that the session uses."""
        spec = self.spec
        pinned = () if spec.host_work_dir is None else (spec.host_work_dir,)
        return (*pinned, *spec.read_only_paths, *spec.read_write_paths)

    def session(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the arguments of the session, as the wire carries them."""
        # Imported late, so that the server can start meanwhile.
        from union.sandbox._wire.values import encode_session

        payload = encode_session(self.spec)
        if env:
            payload["env"] = {**env, **payload.get("env", {})}
        return payload


def _usage_error(argument: str, value: object, accepted: str) -> SandboxUsageError:
    return SandboxUsageError(f"{argument} must be {accepted}, not {value!r}", argument=argument)


def _mode(sandbox_mode: object, backend: object) -> SandboxMode | None:
    """Return the mode that either argument names; both are spellings of the same setting."""
    if sandbox_mode is not None and sandbox_mode not in tuple(BACKENDS):
        raise _usage_error("sandbox_mode", sandbox_mode, "'userns', 'bwrap' or 'landlock'")
    mode = sandbox_mode
    if backend is not None:
        if not isinstance(backend, str) or backend not in _MODES:
            raise _usage_error("backend", backend, "'userns', 'bubblewrap' or 'landlock'")
        mode = _MODES[backend]
        if sandbox_mode is not None and sandbox_mode != mode:
            raise SandboxUsageError(
                f"backend={backend!r} and sandbox_mode={sandbox_mode!r} contradict each other",
                argument="backend",
                hint="pass one of them",
            )
    return cast("SandboxMode | None", mode)


def check_name(name: object) -> str:
    """Check the name of a run."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _usage_error(
            "name", name, "at most 30 lower-case letters, digits and dashes, a letter first"
        )
    return name


def mode_of(backend: str) -> SandboxMode:
    """Return the mode that a backend has in an environment."""
    return cast("SandboxMode", _MODES[backend])


def seconds(argument: str, value: object) -> float:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    settled = validate_timeout(argument, number)
    if settled is None:
        raise _usage_error(argument, value, "a timedelta, or a number of seconds")
    return settled


def _text(argument: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _usage_error(argument, value, "a name, or None for the configured one")
    return value


def resolve_request(
    *,
    environment: object,
    name: object,
    timeout: object,
    timeout_s: object,
    project: object,
    domain: object,
    service_account: object,
    resources: object,
    sandbox_mode: object,
    backend: object,
    ready_timeout: object,
    owner_lease: object,
    **described: object,
) -> Request:
    """Check every argument of ``session()`` before a pod is started.

    ``described`` are the arguments that ``on_device.session()`` has too, under the same rules.
    """
    requested = _mode(sandbox_mode, backend)
    runtime = "container"
    own_mode: SandboxMode | None = None
    own_resources: object = None
    env_vars: dict[str, str] = {}
    credentials: dict[str, dict[str, Any]] = {}
    if environment is None:
        # No environment of landlock is deployed by default: it needs no other pod than userns.
        own_mode = requested if requested in DEFAULT_NAMES else "userns"
        environment_name = DEFAULT_NAMES[own_mode]
    elif isinstance(environment, str) and environment:
        environment_name = environment
        runtime = _declared_runtime(environment)
    elif hasattr(environment, "sandbox_mode") and hasattr(environment, "task_env"):
        environment_name = str(environment.name)  # type: ignore[attr-defined]  # Flyte is not imported here
        own_mode = environment.sandbox_mode
        runtime = str(getattr(environment, "runtime", "container"))
        own_resources = getattr(environment, "resources", None)
        env_vars = dict(getattr(environment, "env_vars", None) or {})
        credentials = dict(getattr(environment, "credentials", None) or {})
    else:
        raise _usage_error("environment", environment, "a SandboxEnvironment, or the name of one")
    mode = requested or own_mode or "userns"
    run = f"sbx-{secrets.token_hex(8)}" if name is None else check_name(name)
    if timeout is not None and timeout_s is not None:
        raise SandboxUsageError(
            f"timeout={timeout!r} and timeout_s={timeout_s!r} are two spellings of one argument",
            argument="timeout_s",
            hint="pass one of them",
        )
    spelled, given = ("timeout", timeout) if timeout_s is None else ("timeout_s", timeout_s)
    total_s = seconds(spelled, given)
    if total_s > MAX_TIMEOUT_S:
        raise _usage_error(spelled, given, "at most 24 hours")
    lease_s = None if owner_lease is None else seconds("owner_lease", owner_lease)
    if lease_s is not None and lease_s < _MIN_LEASE_S:
        raise _usage_error("owner_lease", owner_lease, f"{_MIN_LEASE_S:g} seconds or more, or None")
    spec = resolve_session(
        backend=BACKENDS[mode],
        backends=tuple(BACKENDS.values()),
        **described,
        resources=own_resources if resources is None else resources,
    )
    texts_of(spec.network.allow)  # the description is stored, so it can have no Http entry
    return Request(
        name=run,
        environment=environment_name,
        sandbox_mode=mode,
        overrides_mode=own_mode is None or mode != own_mode,
        timeout_s=total_s,
        ready_timeout_s=seconds("ready_timeout", ready_timeout),
        owner_lease_s=lease_s,
        project=_text("project", project),
        domain=_text("domain", domain),
        service_account=_text("service_account", service_account),
        runtime=runtime,
        resources=resources,
        spec=_with_reserve(spec),
        env_vars=env_vars,
        credentials=credentials,
    )


def _declared_runtime(name: str) -> str:
    """Return the runtime of an environment by its name; empty if it is not declared here."""
    module = sys.modules.get("union.sandbox.cluster._environment")
    profile = None if module is None else module.declared_profile(name)
    if profile is None:
        return "container" if name in DEFAULT_NAMES.values() else ""
    return str(profile.runtime)


def _with_reserve(spec: SessionSpec) -> SessionSpec:
    """Lower the memory limit, so that a command reaches it before the whole pod is killed."""
    memory = spec.limits.memory_bytes
    if memory is None:
        return spec
    reserve = min(_RESERVE, memory // 4)
    limits = dataclasses.replace(spec.limits, memory_bytes=memory - reserve)
    return dataclasses.replace(spec, limits=limits)
