"""SandboxEnvironment: the pods that sandboxes run in, as a Flyte environment with one task."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from union.sandbox._core.optional_deps import require
from union.sandbox._core.resources import limits_from
from union.sandbox.cluster._credentials import check_credentials, variables_of
from union.sandbox.cluster._request import BACKENDS, DEFAULT_NAMES, MAX_TIMEOUT_S
from union.sandbox.errors import SandboxUsageError

require("flyte", extra="flyte", what="a SandboxEnvironment")

import flyte  # noqa: E402 - only where it is known to be there

from union.sandbox.cluster._pod import PodProfile, SandboxPodTemplate  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox.cluster._request import SandboxMode

    DEFAULT_SANDBOX_ENV: SandboxEnvironment
    """The default environment of ``session()``: ``userns``, in an unprivileged pod."""
    DEFAULT_SANDBOX_ENV_BWRAP: SandboxEnvironment
    """The same with ``bwrap``, whose pods need CAP_SYS_ADMIN."""

__all__ = ["SERVED", "SandboxEnvironment", "SandboxResolver", "declared_profile", "in_pod"]

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
_declared: Final[dict[str, PodProfile]] = {}


def declared_profile(name: str) -> PodProfile | None:
    """Return the pod profile of the environment with this name, if this process declares it."""
    return _declared.get(name)


SERVED: Final[list[Any]] = []
"""The environment of this pod, if this process runs in a sandbox's pod."""


def _base_image() -> Any:
    from union.sandbox.cluster._image import base_sandbox_image

    return base_sandbox_image


def _image_of_pod(image: Any) -> Any:
    if isinstance(image, str):
        return image
    from union.sandbox.cluster._image import image_of_pod

    return image_of_pod(image)


@dataclass(repr=False)
class SandboxEnvironment(flyte.TaskEnvironment):
    """The pods that ``session(environment=...)`` launches: image, resources, and isolation.

    Deploy it once, under its name, before sessions use it. All other arguments are those of
    ``flyte.TaskEnvironment``, except that the pod template follows from the arguments below.
    ``env_vars`` and ``secrets`` are for the sandboxes: every command sees them. No token of the
    service account is mounted.

    Attributes:
        image: The image of the pods. Default: ``base_sandbox_image``.
        sandbox_mode: The backend in the pod: ``"userns"``, ``"bwrap"`` or ``"landlock"`` (weaker;
            works in pods whose seccomp profile refuses namespaces). Default: ``"userns"``.
        runtime: ``"container"``, or ``"gvisor"`` to run the whole pod in gVisor. Default:
            ``"container"``.
        sys_cap_admin: Whether the pod gets CAP_SYS_ADMIN and no AppArmor profile. Default None: if
            ``sandbox_mode`` is ``"bwrap"``.
        seccomp_profile: ``"RuntimeDefault"`` or ``"Unconfined"``. Default None: ``"Unconfined"``
            for ``"bwrap"``, otherwise the default of the cluster.
        proc: ``"unmasked"`` gives sandboxes a ``/proc`` of their own, on clusters that support it.
            Default: ``"default"``.
        credentials: Secrets that code in sandboxes can use by ``ServerSecret(name)`` and cannot
            read: for each name a dict with ``variable``, which holds one of ``secrets``, ``host``,
            and optionally ``auth``, ``allow``, ``max_requests`` and ``roles``, as in the file of
            ``sandbox-server --secrets``. Commands do not see these variables. Default: none.

    """

    image: Any = field(default_factory=_base_image)
    sandbox_mode: SandboxMode = "userns"
    runtime: Literal["container", "gvisor"] = "container"
    sys_cap_admin: bool | None = None
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] | None = None
    proc: Literal["default", "unmasked"] = "default"
    credentials: dict[str, dict[str, Any]] = field(default_factory=dict)

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
        self.credentials = check_credentials(self.credentials, _variables(self.secrets))
        self.image = _image_of_pod(self.image)
        profile = self._profile()
        if _declared.setdefault(self.name, profile) != profile:
            raise SandboxUsageError(
                f"a SandboxEnvironment {self.name!r} already exists, with another isolation",
                argument="name",
                hint="sessions find an environment by its name: use a different one for each",
            )
        self.pod_template = SandboxPodTemplate(profile)
        super().__post_init__()
        self._forwarded: tuple[str, ...] | None = None
        self.server_task = self._register()

    def __repr__(self) -> str:
        return (
            f"SandboxEnvironment(name={self.name!r}, sandbox_mode={self.sandbox_mode!r}, "
            f"runtime={self.runtime!r}, sys_cap_admin={self.sys_cap_admin!r})"
        )

    def _profile(self) -> PodProfile:
        return PodProfile(
            **{
                profile.name: getattr(self, profile.name)
                for profile in dataclasses.fields(PodProfile)
            }
        )

    def _check_gpu(self) -> None:
        """Refuse an environment that cannot work: only ``bwrap`` makes a GPU available."""
        if self.sandbox_mode != "bwrap" and limits_from(self.resources).gpus:
            raise SandboxUsageError(
                f"resources: sandbox_mode={self.sandbox_mode!r} shows no GPU; sandbox_mode='bwrap' "
                "does",
                argument="resources",
                hint="pass sandbox_mode='bwrap', or omit the GPU",
            )

    @property
    def task_env(self) -> Self:
        """The ``flyte.Environment`` that ``flyte deploy`` looks for: this object itself."""
        return self

    @property
    def forwarded(self) -> tuple[str, ...]:
        """The variables of the pod that its sandboxes see."""
        if self._forwarded is not None:
            return self._forwarded
        names = list(self.env_vars or {})
        hidden = variables_of(self.credentials)
        names += [name for name in _variables(self.secrets) if name not in hidden]
        return tuple(dict.fromkeys(name for name in names if _VARIABLE.fullmatch(name)))

    def _register(self) -> Any:
        ceiling = timedelta(seconds=MAX_TIMEOUT_S)
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


def _variables(request: Any) -> list[str]:
    """Return the variables that hold the secrets of an environment."""
    return [name for secret in _secrets(request) if (name := _variable(secret))]


def _variable(secret: Any) -> str | None:
    """Return the variable that holds a secret; None for a secret in a file."""
    name: str | None = getattr(secret, "as_env_var", None)
    return name


def _body(environment: SandboxEnvironment) -> Callable[..., Any]:
    """Return the task of one environment. Its name is part of the deployment."""

    async def sandbox_server(  # noqa: PLR0917 - Flyte's tasks take what they take by name
        owner_sha256: str,
        guest_sha256: str,
        timeout_s: float,
        session: str,
        announce_key: str,
        sandbox_mode: str = "",
        announce_to: str = "",
    ) -> str:
        """Serve one sandbox session; return why it ended."""
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
            credentials=environment.credentials,
        )

    # Flyte resolves annotations by name in a module that lacks these names.
    sandbox_server.__annotations__ = {
        "owner_sha256": str, "guest_sha256": str, "timeout_s": float, "session": str,
        "announce_key": str, "sandbox_mode": str, "announce_to": str, "return": str,
    }  # fmt: skip
    return sandbox_server


def in_pod(
    name: str,
    sandbox_mode: SandboxMode,
    *,
    forwarded: tuple[str, ...],
    credentials: dict[str, dict[str, Any]] | None = None,
) -> SandboxEnvironment:
    """Return the environment for use in its own pod: nothing is built, nothing is deployed."""
    _declared.pop(name, None)
    environment = SandboxEnvironment(name=name, image="auto", sandbox_mode=sandbox_mode)
    environment._forwarded = forwarded  # noqa: SLF001 - fixed when it was deployed
    environment.credentials = credentials or {}
    return environment


class SandboxResolver:
    """Encodes the settings of an environment as arguments of its pods, and decodes them there.

    The arguments are part of the deployment. A caller cannot change them, so the environment alone
    decides which variables of its pod its sandboxes see.
    """

    @property
    def import_path(self) -> str:
        return _RESOLVER

    def loader_args(self, task: Any, root_dir: object = None) -> list[str]:  # noqa: ARG002 - Flyte's
        environment = task.parent_env()
        stored = environment.credentials
        return [
            "environment", environment.name,
            "mode", environment.sandbox_mode,
            "forward", ",".join(environment.forwarded) or _NO_VARIABLES,
            *(("credentials", json.dumps(stored)) if stored else ()),
        ]  # fmt: skip

    def load_task(self, loader_args: Sequence[str]) -> Any:
        given = dict(zip(loader_args[::2], loader_args[1::2], strict=True))
        names = given["forward"]
        environment = in_pod(
            given["environment"],
            cast("SandboxMode", given["mode"]),
            forwarded=() if names == _NO_VARIABLES else tuple(names.split(",")),
            credentials=json.loads(given.get("credentials", "{}")),
        )
        SERVED.append(environment)  # Tasks hold only a weak reference to their environment.
        return environment.server_task


_DEFAULTS: Final[dict[str, tuple[SandboxMode, str]]] = {
    "DEFAULT_SANDBOX_ENV": ("userns", "Sandboxes in user namespaces, in a pod without privileges"),
    "DEFAULT_SANDBOX_ENV_BWRAP": ("bwrap", "Sandboxes by bubblewrap, in a pod that allows it"),
}


def __getattr__(name: str) -> Any:
    # Created on first use: an environment is listed for deployment as soon as it exists.
    if name not in _DEFAULTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mode, description = _DEFAULTS[name]
    made = SandboxEnvironment(name=DEFAULT_NAMES[mode], sandbox_mode=mode, description=description)
    globals()[name] = made
    return made
