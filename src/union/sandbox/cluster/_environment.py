"""SandboxEnvironment: the pods that sandboxes run in, as a Flyte environment with one task."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from union.sandbox._core.optional_deps import require
from union.sandbox._core.resources import limits_from
from union.sandbox.cluster._request import BACKENDS, DEFAULT_NAMES, MOST_S
from union.sandbox.errors import SandboxUsageError

require("flyte", extra="flyte", what="a SandboxEnvironment")

import flyte  # noqa: E402 - only where it is known to be there

from union.sandbox.cluster._pod import Posture, SandboxPodTemplate  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox.cluster._request import SandboxMode

    DEFAULT_SANDBOX_ENV: SandboxEnvironment
    """The environment of ``session()`` unless it is told another: ``userns``, an ordinary pod."""
    DEFAULT_SANDBOX_ENV_BWRAP: SandboxEnvironment
    """The same with ``bwrap``, whose pods need CAP_SYS_ADMIN."""

__all__ = ["SERVED", "SandboxEnvironment", "SandboxResolver", "declared_posture", "in_pod"]

_CHOICES: Final = {
    "sandbox_mode": tuple(BACKENDS),
    "runtime": ("container", "gvisor"),
    "sys_cap_admin": (None, True, False),
    "seccomp_profile": (None, "RuntimeDefault", "Unconfined"),
    "proc": ("default", "unmasked"),
}
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESOLVER: Final = "union.sandbox.cluster._resolver.SandboxResolver"
_NO_VARIABLES: Final = "-"
_declared: Final[dict[str, Posture]] = {}


def declared_posture(name: str) -> Posture | None:
    """The posture of the environment with this name, if this process has declared one."""
    return _declared.get(name)


SERVED: Final[list[Any]] = []
"""The environment of the pod that this is, if it is one."""


def _base_image() -> Any:
    from union.sandbox.cluster._image import base_sandbox_image

    return base_sandbox_image


@dataclass(repr=False)
class SandboxEnvironment(flyte.TaskEnvironment):
    """The pods that ``session(environment=...)`` launches: image, resources, and isolation.

    ``sandbox_mode`` is the backend in the pod: ``"userns"`` or ``"bwrap"``. ``runtime="gvisor"``
    puts gVisor under the whole pod. ``sys_cap_admin`` grants CAP_SYS_ADMIN and no AppArmor profile:
    None if ``bwrap`` is to work, True always, False never. ``seccomp_profile`` is the pod's: None
    lifts it if ``bwrap`` is to work, and leaves the cluster's otherwise. ``proc="unmasked"`` gives
    sandboxes a ``/proc`` of their own, on clusters that can.

    ``service_account`` is the Kubernetes service account of the pods; no token of it is mounted.
    ``env_vars`` and ``secrets`` of the environment are for the sandboxes: every command sees them.
    Everything else is as for ``flyte.TaskEnvironment``, except that the pod template follows from
    the above. It is deployed once, under its name, before sessions can use it.
    """

    image: Any = field(default_factory=_base_image)
    sandbox_mode: SandboxMode = "userns"
    runtime: Literal["container", "gvisor"] = "container"
    sys_cap_admin: bool | None = None
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] | None = None
    proc: Literal["default", "unmasked"] = "default"

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or value == choice for choice in accepted):
                shown = ", ".join(map(repr, accepted))
                raise SandboxUsageError(
                    f"{name} must be one of {shown}, not {value!r}", argument=name
                )
        if self.pod_template is not None and not isinstance(self.pod_template, SandboxPodTemplate):
            raise SandboxUsageError(
                "a SandboxEnvironment writes its own pod template",
                argument="pod_template",
                hint="sandbox_mode, runtime, sys_cap_admin, seccomp_profile and proc decide it",
            )
        self._check_gpu()
        posture = self._posture()
        if _declared.setdefault(self.name, posture) != posture:
            raise SandboxUsageError(
                f"there is a SandboxEnvironment {self.name!r} already, with another isolation",
                argument="name",
                hint="sessions find an environment by its name: give each its own",
            )
        self.pod_template = SandboxPodTemplate(posture)
        super().__post_init__()
        self._forwarded: tuple[str, ...] | None = None
        self.server_task = self._register()

    def __repr__(self) -> str:
        return (
            f"SandboxEnvironment(name={self.name!r}, sandbox_mode={self.sandbox_mode!r}, "
            f"runtime={self.runtime!r}, sys_cap_admin={self.sys_cap_admin!r})"
        )

    def _posture(self) -> Posture:
        return Posture(
            **{posture.name: getattr(self, posture.name) for posture in dataclasses.fields(Posture)}
        )

    def _check_gpu(self) -> None:
        """A GPU is shown by ``bwrap`` alone: an environment that cannot work is not deployed."""
        if self.sandbox_mode != "bwrap" and limits_from(self.resources).gpus:
            raise SandboxUsageError(
                f"resources: sandbox_mode={self.sandbox_mode!r} shows no GPU; sandbox_mode='bwrap' "
                "does",
                argument="resources",
                hint="pass sandbox_mode='bwrap', or leave the GPU out",
            )

    @property
    def task_env(self) -> Self:
        """What ``flyte deploy`` looks for: this is a ``flyte.Environment`` itself."""
        return self

    @property
    def forwarded(self) -> tuple[str, ...]:
        """The variables of the pod that its sandboxes get to see."""
        if self._forwarded is not None:
            return self._forwarded
        names = list(self.env_vars or {})
        names += [name for secret in _secrets(self.secrets) if (name := _variable(secret))]
        return tuple(dict.fromkeys(name for name in names if _VARIABLE.fullmatch(name)))

    def _register(self) -> Any:
        ceiling = timedelta(seconds=MOST_S)
        decorate: Any = self.task(
            retries=0,
            timeout=flyte.Timeout(max_runtime=ceiling, deadline=ceiling),
            task_resolver=SandboxResolver(),
        )
        return decorate(_body(self))


def _secrets(request: Any) -> list[Any]:
    if request is None:
        return []
    listed = request if isinstance(request, list) else [request]
    return [flyte.Secret(key=item) if isinstance(item, str) else item for item in listed]


def _variable(secret: Any) -> str | None:
    """The variable that a secret arrives in; None for one that is a file."""
    name: str | None = getattr(secret, "as_env_var", None)
    return name


def _body(environment: SandboxEnvironment) -> Callable[..., Any]:
    """The task, for one environment. Its name is part of what is deployed."""

    async def sandbox_server(  # noqa: PLR0917 - Flyte's tasks take what they take by name
        owner_sha256: str,
        guest_sha256: str,
        timeout_s: float,
        session: str,
        announce_key: str,
        sandbox_mode: str = "",
        announce_to: str = "",
    ) -> str:
        """Serves one sandbox session; returns why it ended."""
        from union.sandbox.cluster._task import serve_run

        return await serve_run(
            owner_sha256=owner_sha256,
            guest_sha256=guest_sha256,
            timeout_s=timeout_s,
            session=session,
            sandbox_mode=sandbox_mode or environment.sandbox_mode,
            announce_to=announce_to,
            announce_key=announce_key,
            forwarded=environment.forwarded,
        )

    # Flyte looks the types up by their names, in a module that does not have them.
    sandbox_server.__annotations__ = {
        "owner_sha256": str, "guest_sha256": str, "timeout_s": float, "session": str,
        "announce_key": str, "sandbox_mode": str, "announce_to": str, "return": str,
    }  # fmt: skip
    return sandbox_server


def in_pod(
    name: str, sandbox_mode: SandboxMode, *, forwarded: tuple[str, ...]
) -> SandboxEnvironment:
    """The environment as its own pod needs it: nothing is built, nothing is deployed."""
    _declared.pop(name, None)
    environment = SandboxEnvironment(name=name, image="auto", sandbox_mode=sandbox_mode)
    environment._forwarded = forwarded  # noqa: SLF001 - told by whoever deployed it
    return environment


class SandboxResolver:
    """Encodes what a pod must know of its environment as arguments, and decodes them there.

    The arguments are part of the deployment. A caller cannot change them, so the environment alone
    decides which variables of its pod its sandboxes see.
    """

    @property
    def import_path(self) -> str:
        return _RESOLVER

    def loader_args(self, task: Any, root_dir: object = None) -> list[str]:  # noqa: ARG002 - Flyte's
        environment = task.parent_env()
        return [
            "environment", environment.name,
            "mode", environment.sandbox_mode,
            "forward", ",".join(environment.forwarded) or _NO_VARIABLES,
        ]  # fmt: skip

    def load_task(self, loader_args: Sequence[str]) -> Any:
        given = dict(zip(loader_args[::2], loader_args[1::2], strict=True))
        names = given["forward"]
        environment = in_pod(
            given["environment"],
            cast("SandboxMode", given["mode"]),
            forwarded=() if names == _NO_VARIABLES else tuple(names.split(",")),
        )
        SERVED.append(environment)  # tasks know their environment by a weak reference
        return environment.server_task


_DEFAULTS: Final[dict[str, tuple[SandboxMode, str]]] = {
    "DEFAULT_SANDBOX_ENV": ("userns", "Sandboxes in user namespaces, in a pod without privileges"),
    "DEFAULT_SANDBOX_ENV_BWRAP": ("bwrap", "Sandboxes by bubblewrap, in a pod that lets it"),
}


def __getattr__(name: str) -> Any:
    # Made when asked for: an environment is listed for deployment as soon as it exists.
    if name not in _DEFAULTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mode, description = _DEFAULTS[name]
    made = SandboxEnvironment(name=DEFAULT_NAMES[mode], sandbox_mode=mode, description=description)
    globals()[name] = made
    return made
