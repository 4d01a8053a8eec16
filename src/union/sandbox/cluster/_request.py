"""The arguments of ``session()``, checked before anything is started."""

from __future__ import annotations

import dataclasses
import re
import secrets
import sys
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
    "resolve_request",
]

SandboxMode = Literal["userns", "bwrap"]
BACKENDS: Final[dict[str, str]] = {"userns": "userns", "bwrap": "bubblewrap"}
_MODES: Final = {"userns": "userns", "bubblewrap": "bwrap", "bwrap": "bwrap"}
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
    service_account: str | None = None
    runtime: str = "container"
    """What the environment asks for; empty for a name that this process has not declared."""
    resources: object = None
    """An override of the environment's; None: as deployed."""
    spec: SessionSpec
    env_vars: dict[str, str] = field(default_factory=dict)
    """What the environment gives to its pods; no pod, and it has to be given here."""

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
        """What the server is told of the session."""
        # Not needed until a server has been started, which can be under way meanwhile.
        from union.sandbox._wire.values import encode_session

        told = encode_session(self.spec)
        if env:
            told["env"] = {**env, **told.get("env", {})}
        return told


def _wrong(argument: str, value: object, accepted: str) -> SandboxUsageError:
    return SandboxUsageError(f"{argument} must be {accepted}, not {value!r}", argument=argument)


def _mode(sandbox_mode: object, backend: object) -> SandboxMode | None:
    """The mode that either argument names; both are two spellings of one."""
    if sandbox_mode is not None and sandbox_mode not in tuple(BACKENDS):
        raise _wrong("sandbox_mode", sandbox_mode, "'userns' or 'bwrap'")
    mode = sandbox_mode
    if backend is not None:
        if not isinstance(backend, str) or backend not in _MODES:
            raise _wrong("backend", backend, "'userns' or 'bubblewrap'")
        mode = _MODES[backend]
        if sandbox_mode is not None and sandbox_mode != mode:
            raise SandboxUsageError(
                f"backend={backend!r} and sandbox_mode={sandbox_mode!r} contradict each other",
                argument="backend",
                hint="pass one of them",
            )
    return cast("SandboxMode | None", mode)


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
    """Check every argument of ``session()``; a mistake costs no pod.

    ``described`` are the arguments that ``on_device.session()`` has too, under the same rules.
    """
    asked = _mode(sandbox_mode, backend)
    runtime = "container"
    own_mode: SandboxMode | None = None
    own_resources: object = None
    env_vars: dict[str, str] = {}
    if environment is None:
        called = DEFAULT_NAMES[asked or "userns"]
        own_mode = asked or "userns"
    elif isinstance(environment, str) and environment:
        called = environment
        runtime = _declared_runtime(environment)
    elif hasattr(environment, "sandbox_mode") and hasattr(environment, "task_env"):
        called = str(environment.name)  # type: ignore[attr-defined]  # Flyte is not imported here
        own_mode = environment.sandbox_mode
        runtime = str(getattr(environment, "runtime", "container"))
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
    if timeout is not None and timeout_s is not None:
        raise SandboxUsageError(
            f"timeout={timeout!r} and timeout_s={timeout_s!r} are two spellings of one argument",
            argument="timeout_s",
            hint="pass one of them",
        )
    spelled, given = ("timeout", timeout) if timeout_s is None else ("timeout_s", timeout_s)
    lasts_s = _seconds(spelled, given)
    if lasts_s > MOST_S:
        raise _wrong(spelled, given, "at most 24 hours")
    lease_s = None if owner_lease is None else _seconds("owner_lease", owner_lease)
    if lease_s is not None and lease_s < _LEAST_LEASE_S:
        raise _wrong("owner_lease", owner_lease, f"{_LEAST_LEASE_S:g} seconds or more, or None")
    spec = resolve_session(
        backend=BACKENDS[mode],
        backends=tuple(BACKENDS.values()),
        **described,
        resources=own_resources if resources is None else resources,
    )
    return Request(
        name=name,
        environment=called,
        sandbox_mode=mode,
        overrides_mode=own_mode is None or mode != own_mode,
        timeout_s=lasts_s,
        ready_timeout_s=_seconds("ready_timeout", ready_timeout),
        owner_lease_s=lease_s,
        project=_text("project", project),
        domain=_text("domain", domain),
        service_account=_text("service_account", service_account),
        runtime=runtime,
        resources=resources,
        spec=_with_reserve(spec),
        env_vars=env_vars,
    )


def _declared_runtime(name: str) -> str:
    """The runtime of an environment that is known by its name; empty if it is not."""
    module = sys.modules.get("union.sandbox.cluster._environment")
    posture = None if module is None else module.declared_posture(name)
    if posture is None:
        return "container" if name in DEFAULT_NAMES.values() else ""
    return str(posture.runtime)


def _with_reserve(spec: SessionSpec) -> SessionSpec:
    """A pod that is full is killed as a whole: what runs in it must reach its own limit first."""
    memory = spec.limits.memory_bytes
    if memory is None:
        return spec
    reserve = min(_RESERVE, memory // 4)
    limits = dataclasses.replace(spec.limits, memory_bytes=memory - reserve)
    return dataclasses.replace(spec, limits=limits)
