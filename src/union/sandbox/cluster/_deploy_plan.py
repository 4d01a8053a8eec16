"""Describes a deployment of the default environments, without a cluster and without Flyte's client.

``unionai-sandbox-deploy --dry-run`` prints it: the environments and their pods, the image with its
layers, and the content of the wheel that the image installs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from union.sandbox.cluster._wheel import current_wheel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox.cluster._environment import SandboxEnvironment
    from union.sandbox.cluster._wheel import Wheel

__all__ = ["describe_deployment"]


def describe_deployment(environments: Sequence[SandboxEnvironment]) -> str:
    """Return a description of the deployment of these environments."""
    lines: list[str] = []
    images: dict[str, Any] = {}
    for environment in environments:
        lines += [f"environment {environment.name}", *_pod(environment)]
        images.setdefault(environment.image.uri, environment.image)
    for uri, image in images.items():
        lines += [f"image {uri}", *_layers(image)]
    lines += _wheel(current_wheel())
    return "\n".join(lines) + "\n"


def _pod(environment: SandboxEnvironment) -> list[str]:
    template: Any = environment.pod_template
    spec = template.pod_spec
    security = spec.containers[0].security_context
    added = security.capabilities.add if security.capabilities else None
    profile = security.seccomp_profile
    return [
        f"  task            {environment.server_task.name}",
        f"  sandbox_mode    {environment.sandbox_mode}",
        f"  runtime         {environment.runtime}",
        f"  image           {environment.image.uri}",
        f"  capabilities    {', '.join(added) if added else 'none added'}",
        f"  seccomp         {profile.type if profile else 'the default of the cluster'}",
        f"  service account token  {'mounted' if spec.automount_service_account_token else 'none'}",
    ]


def _layers(image: Any) -> list[str]:
    lines = [
        f"  base            {image.base_image}",
        f"  platform        {', '.join(image.platform or ())}",
    ]
    for layer in image._layers:  # noqa: SLF001 - the SDK has no public name for it
        kind = type(layer).__name__
        if kind == "AptPackages":
            lines.append(f"  apt packages    {', '.join(layer.packages)}")
        elif kind == "PipPackages":
            lines.append(f"  pip packages    {', '.join(layer.packages or ())}")
        elif kind == "SandboxWheelLayer":
            lines.append(f"  wheel           {layer.package_name}")
        elif kind == "_DockerLines":
            lines += [f"  line            {line}" for line in layer.lines]
        else:
            lines.append(f"  layer           {kind}")
    return lines


def _wheel(wheel: Wheel) -> list[str]:
    source = wheel.source
    folders = Counter(name.rpartition("/")[0] for name in wheel.names)
    return [
        f"wheel {wheel.path.name}",
        f"  made from       {source.kind}: {source.root}",
        f"  size            {wheel.path.stat().st_size} bytes",
        f"  sha256          {wheel.sha256}",
        f"  launcher        {source.machine}",
        f"  files           {len(wheel.names)}",
        *(f"    {folder}/  {count}" for folder, count in sorted(folders.items())),
    ]
