"""The pod that a sandbox's server runs in: what it may do, and what it is spared.

Kubernetes' own classes are needed to write a template, and nowhere else: so it is written when it
is asked for, which is at deployment. A caller, and the pod itself, do without them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from flyte import PodTemplate

from union.sandbox._core.optional_deps import require
from union.sandbox.cluster._request import MAX_TIMEOUT_S

if TYPE_CHECKING:
    from union.sandbox.cluster._request import SandboxMode

__all__ = ["PORT", "PodProfile", "SandboxPodTemplate"]

PORT: Final = 8372
_PRIMARY: Final = "primary"
_GRACE_S: Final = 20
"""More than a supervisor takes to end its server by force."""
_LAST_RESORT_S: Final = int(MAX_TIMEOUT_S) + 600


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProfile:
    """The privileges of a pod, and its runtime."""

    sandbox_mode: SandboxMode = "userns"
    runtime: Literal["container", "gvisor"] = "container"
    sys_cap_admin: bool | None = None
    """None: granted for ``bwrap``."""
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] | None = None
    """None: ``Unconfined`` for ``bwrap`` (which needs ``pivot_root``), else the cluster's."""
    proc: Literal["default", "unmasked"] = "default"

    @property
    def has_sys_admin(self) -> bool:
        """Whether the pod gets CAP_SYS_ADMIN, and no AppArmor profile."""
        if self.sys_cap_admin is None:
            return self.sandbox_mode == "bwrap"
        return self.sys_cap_admin

    @property
    def seccomp(self) -> str | None:
        if self.seccomp_profile is None and self.sandbox_mode == "bwrap" and self.has_sys_admin:
            return "Unconfined"
        return self.seccomp_profile


class SandboxPodTemplate(PodTemplate):
    """A pod template that is built when it is first read."""

    def __init__(self, profile: PodProfile) -> None:
        self.profile = profile
        self.primary_container_name = _PRIMARY
        self.labels = {"union-sandbox": "server"}
        self._written: PodTemplate | None = None
        self._changed: Any = None

    def __repr__(self) -> str:
        return f"SandboxPodTemplate({self.profile!r})"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SandboxPodTemplate) and other.profile == self.profile

    def _template(self) -> PodTemplate:
        if self._written is None:
            self._written = _write(self.profile)
        return self._written

    @property
    def annotations(self) -> dict[str, str] | None:  # type: ignore[override]  # written late
        return self._template().annotations

    @property
    def pod_spec(self) -> Any:
        return self._template().pod_spec

    @pod_spec.setter
    def pod_spec(self, value: Any) -> None:
        self._template().pod_spec = value

    def __deepcopy__(self, memo: dict[int, Any]) -> PodTemplate:
        # A copy is made to be filled in, which needs a plain template.
        return PodTemplate(
            pod_spec=copy.deepcopy(self.pod_spec, memo),
            primary_container_name=self.primary_container_name,
            labels=dict(self.labels or {}),
            annotations=dict(self.annotations or {}) or None,
        )


def _write(profile: PodProfile) -> PodTemplate:
    require("kubernetes", extra="deploy", what="the pod template of a SandboxEnvironment")
    from kubernetes import client as k8s

    security = k8s.V1SecurityContext(allow_privilege_escalation=False)
    if profile.seccomp is not None:
        security.seccomp_profile = k8s.V1SeccompProfile(type=profile.seccomp)
    if profile.proc == "unmasked":
        security.proc_mount = "Unmasked"
    primary = k8s.V1Container(
        name=_PRIMARY,
        env=[
            k8s.V1EnvVar(
                name="POD_IP",
                value_from=k8s.V1EnvVarSource(
                    field_ref=k8s.V1ObjectFieldSelector(field_path="status.podIP")
                ),
            )
        ],
        ports=[k8s.V1ContainerPort(name="sandbox", container_port=PORT, protocol="TCP")],
        security_context=security,
    )
    spec = k8s.V1PodSpec(
        containers=[primary],
        # Nothing in the pod uses Kubernetes, and sandboxed code must not find a token.
        automount_service_account_token=False,
        enable_service_links=False,
        active_deadline_seconds=_LAST_RESORT_S,
        termination_grace_period_seconds=_GRACE_S,
        runtime_class_name="gvisor" if profile.runtime == "gvisor" else None,
        # Kubernetes shows an unmasked /proc only to pods with user ids of their own.
        host_users=False if profile.proc == "unmasked" else None,
    )
    template = PodTemplate.from_spec(spec, primary_container_name=_PRIMARY)
    if not profile.has_sys_admin:
        return template
    template = template.allow_nested_sandboxing()
    granted: Any = template.pod_spec
    # The annotation, which that sets, has been superseded since Kubernetes 1.30.
    granted.containers[0].security_context.app_armor_profile = k8s.V1AppArmorProfile(
        type="Unconfined"
    )
    return template
