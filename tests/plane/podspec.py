"""The pod that an action requests from Kubernetes.

Both executors start from this document: one sends it, the other runs its primary container as a
process. So a test that inspects a process sees what the pod would have received.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteidl2.core import tasks_pb2
from google.protobuf.json_format import MessageToDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.plane.state import Action

ORG = "stand-in"
PRIMARY = "primary"
_RESOURCES = {
    tasks_pb2.Resources.CPU: "cpu",
    tasks_pb2.Resources.GPU: "nvidia.com/gpu",
    tasks_pb2.Resources.MEMORY: "memory",
    tasks_pb2.Resources.EPHEMERAL_STORAGE: "ephemeral-storage",
}


class MissingSecretError(LookupError):
    """The task requires a secret that the plane does not have."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The settings of every pod: the address of the plane, the store, and the secrets."""

    endpoint: str
    store: str
    secrets: Mapping[str, str] = field(default_factory=dict)
    """By key, or by ``group/key``."""


def pod_name(action: Action) -> str:
    return f"{action.details.id.run.name}-{action.name}-{action.attempt.attempt - 1}"


def pod_namespace(action: Action) -> str:
    return f"{action.details.id.run.project}-{action.details.id.run.domain}"


def pod_of(action: Action, around: Surroundings) -> dict[str, Any]:
    """Return the pod for the current attempt of an action."""
    template = action.details.task.task_template
    spec, labels, annotations = _spec_of(template)
    container = primary_of(spec, template.k8s_pod.primary_container_name)
    known = _templates(action)
    for field_name in ("command", "args"):
        words = container.get(field_name)
        if words:
            container[field_name] = [_filled(word, known) for word in words]
    ours = {**_runtime_env(action, around), **_secret_env(template, around)}
    asked = {pair.key: pair.value for pair in action.run.spec.envs.values}
    container["env"] = _merged(_pairs(ours), container.get("env", []), _pairs(asked))
    spec["restartPolicy"] = "Never"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(action),
            "namespace": pod_namespace(action),
            "labels": {
                **labels,
                **action.run.spec.labels.values,
                "flyte.org/run": action.details.id.run.name,
                "flyte.org/action": action.name,
            },
            "annotations": {**annotations, **action.run.spec.annotations.values},
        },
        "spec": spec,
    }


def primary_of(spec: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Return the container that runs the task."""
    wanted = [c for c in spec["containers"] if c["name"] == (name or PRIMARY)]
    return (wanted or spec["containers"])[0]


def _spec_of(
    template: tasks_pb2.TaskTemplate,
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    if template.HasField("k8s_pod"):
        pod = template.k8s_pod
        spec = _whole_numbers(MessageToDict(pod.pod_spec))
        return spec, dict(pod.metadata.labels), dict(pod.metadata.annotations)
    container = template.container
    made: dict[str, Any] = {
        "name": PRIMARY,
        "image": container.image,
        "args": list(container.args),
        "env": _pairs({pair.key: pair.value for pair in container.env}),
    }
    if container.command:
        made["command"] = list(container.command)
    resources = {
        "requests": _resources(container.resources.requests),
        "limits": _resources(container.resources.limits),
    }
    if any(resources.values()):
        made["resources"] = {kind: payload for kind, payload in resources.items() if payload}
    return {"containers": [made]}, {}, {}


def _whole_numbers(value: Any) -> Any:
    """Convert whole floats: a Struct has only floats, and the Kubernetes API needs ``8080``."""
    if isinstance(value, dict):
        return {key: _whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _resources(entries: Iterable[tasks_pb2.Resources.ResourceEntry]) -> dict[str, str]:
    return {_RESOURCES[e.name]: e.value for e in entries if e.name in _RESOURCES}


def _templates(action: Action) -> dict[str, str]:
    return {
        "input": action.input_uri,
        "outputPrefix": action.output_prefix,
        "rawOutputDataPrefix": f"{action.output_prefix}/raw",
        "checkpointOutputPrefix": f"{action.output_prefix}/checkpoint",
        "prevCheckpointPrefix": "",
        "runName": action.details.id.run.name,
        "actionName": action.name,
        "podName": pod_name(action),
        "runStartTime": action.run.created.ToJsonString(),
    }


def _filled(word: str, known: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*\.(\w+)\s*\}\}", lambda m: known.get(m[1], m[0]), word)


def _runtime_env(action: Action, around: Surroundings) -> dict[str, str]:
    run = action.details.id.run
    return {
        "_U_EP_OVERRIDE": around.endpoint,
        "_U_INSECURE": "true",
        "_U_USE_ACTIONS": "1",
        "_U_RUN_BASE": action.run.base,
        "_U_ORG_NAME": run.org or ORG,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": run.project,
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": run.domain,
        "RUN_NAME": run.name,
        "ACTION_NAME": action.name,
        "FLYTE_ATTEMPT_NUMBER": str(action.attempt.attempt - 1),
        **store_env(around.store),
    }


def store_env(endpoint: str) -> dict[str, str]:
    """Return the variables that point the SDK's storage client to the plane's store."""
    return {
        "FLYTE_AWS_ENDPOINT": endpoint,
        "FLYTE_AWS_ACCESS_KEY_ID": "stand-in",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "stand-in",
    }


def _secret_env(template: tasks_pb2.TaskTemplate, around: Surroundings) -> dict[str, str]:
    found = {}
    for secret in template.security_context.secrets:
        full = f"{secret.group}/{secret.key}" if secret.group else secret.key
        value = around.secrets.get(full, around.secrets.get(secret.key))
        if value is None:
            raise MissingSecretError(full)
        named = f"{secret.group}_{secret.key}" if secret.group else secret.key
        found[secret.env_var or named.upper().replace("-", "_")] = value
    return found


def _pairs(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _merged(*groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one entry per name; the last one wins, as in a container."""
    return list({entry["name"]: entry for group in groups for entry in group}.values())
