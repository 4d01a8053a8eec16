"""The requests of the pod executor to Kubernetes, and how it handles the replies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flyte
import pytest
from flyteidl2.common import identifier_pb2
from flyteidl2.core import literals_pb2, security_pb2
from flyteidl2.task import run_pb2, task_definition_pb2
from kubernetes.client import (
    ApiClient,
    V1Container,
    V1ContainerPort,
    V1EnvVar,
    V1EnvVarSource,
    V1ObjectFieldSelector,
    V1PodSpec,
)
from tests.plane.pods import KubePods
from tests.plane.podspec import MissingSecretError, Surroundings, pod_of
from tests.plane.runs import action_details
from tests.plane.state import Action, Run, State

from union.sandbox.cluster._run_state import waiting_reason

AROUND = Surroundings(
    endpoint="http://192.0.2.1:80", store="http://192.0.2.1:80/s3", secrets={"team/key": "s"}
)
RUNTIME_ENV = {
    "_U_EP_OVERRIDE": "http://192.0.2.1:80",
    "_U_INSECURE": "true",
    "_U_USE_ACTIONS": "1",
    "_U_RUN_BASE": "s3://plane/p/d/run",
    "_U_ORG_NAME": "stand-in",
    "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
    "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
    "RUN_NAME": "run",
    "ACTION_NAME": "a0",
    "FLYTE_ATTEMPT_NUMBER": "0",
    "FLYTE_AWS_ENDPOINT": "http://192.0.2.1:80/s3",
    "FLYTE_AWS_ACCESS_KEY_ID": "stand-in",
    "FLYTE_AWS_SECRET_ACCESS_KEY": "stand-in",
}


def action_of(spec: task_definition_pb2.TaskSpec, **asked: Any) -> Action:
    run_id = identifier_pb2.RunIdentifier(project="p", domain="d", name="run")
    run = Run(run_id, run_pb2.RunSpec(**asked))
    run.created.FromJsonString("2026-01-02T03:04:05Z")
    action = Action(run, action_details(run_id, "a0", spec), "s3://plane/in", run.base)
    action.details.attempts.add(attempt=1)
    return action


def spec_with_container() -> task_definition_pb2.TaskSpec:
    spec = task_definition_pb2.TaskSpec()
    container = spec.task_template.container
    container.image = "image:1"
    container.args.extend(["a0", "--inputs", "{{.input}}", "--outputs-path", "{{.outputPrefix}}"])
    container.args.extend(["--run-start-time", "{{.runStartTime}}", "--unknown", "{{.nonesuch}}"])
    container.env.append(literals_pb2.KeyValuePair(key="SOURCE", value="by the task"))
    return spec


def environment_of(pod: dict[str, Any]) -> dict[str, Any]:
    entries = pod["spec"]["containers"][0]["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_a_container_becomes_a_pod_with_its_arguments_filled_in():
    envs = run_pb2.Envs(values=[literals_pb2.KeyValuePair(key="SOURCE", value="by the run")])
    labels = run_pb2.Labels(values={"union-sandbox": "1"})
    pod = pod_of(action_of(spec_with_container(), envs=envs, labels=labels), AROUND)
    assert environment_of(pod) == {**RUNTIME_ENV, "SOURCE": "by the run"}
    del pod["spec"]["containers"][0]["env"]
    assert pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "run-a0-0",
            "namespace": "p-d",
            "labels": {
                "union-sandbox": "1",
                "flyte.org/run": "run",
                "flyte.org/action": "a0",
            },
            "annotations": {},
        },
        "spec": {
            "containers": [
                {
                    "name": "primary",
                    "image": "image:1",
                    "args": [
                        "a0",
                        "--inputs",
                        "s3://plane/in",
                        "--outputs-path",
                        "s3://plane/p/d/run/a0/1",
                        "--run-start-time",
                        "2026-01-02T03:04:05Z",
                        "--unknown",
                        "{{.nonesuch}}",
                    ],
                }
            ],
            "restartPolicy": "Never",
        },
    }


def test_a_pod_template_of_the_sdk_survives():
    from flyte._internal.runtime.task_serde import translate_task_to_wire
    from flyte.models import SerializationContext

    address = V1EnvVarSource(field_ref=V1ObjectFieldSelector(field_path="status.podIP"))
    container = V1Container(
        name="primary",
        env=[V1EnvVar(name="POD_IP", value_from=address)],
        ports=[V1ContainerPort(container_port=8080, name="http")],
    )
    template = flyte.PodTemplate.from_spec(
        V1PodSpec(containers=[container], active_deadline_seconds=60, runtime_class_name="gvisor"),
        labels={"l": "1"},
        annotations={"a": "2"},
    )
    env = flyte.TaskEnvironment(name="templated", image="image:1", pod_template=template)

    @env.task
    async def nothing() -> None: ...

    context = SerializationContext(version="1", root_dir=Path(__file__).parent)
    pod = pod_of(action_of(translate_task_to_wire(nothing, context)), AROUND)
    primary = pod["spec"]["containers"][0]
    assert environment_of(pod)["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert primary["args"][:3] == ["a0", "--inputs", "s3://plane/in"]
    assert primary["ports"] == [{"containerPort": 8080, "name": "http"}]
    assert pod["spec"]["activeDeadlineSeconds"] == 60
    assert isinstance(pod["spec"]["activeDeadlineSeconds"], int)
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    assert pod["metadata"]["labels"]["l"] == "1"
    assert pod["metadata"]["annotations"] == {"a": "2"}
    assert_known_to_kubernetes(pod)


def assert_known_to_kubernetes(pod: dict[str, Any]) -> None:
    """Every field belongs to the API: nothing is lost in a round trip through its types."""
    api = ApiClient()
    parsed = api.deserialize(json.dumps(pod), "V1Pod", "application/json")
    assert api.sanitize_for_serialization(parsed) == pod


def test_a_secret_is_a_variable_and_one_that_is_missing_is_an_error():
    spec = spec_with_container()
    secret = security_pb2.Secret(group="team", key="key")
    spec.task_template.security_context.secrets.append(secret)
    assert environment_of(pod_of(action_of(spec), AROUND))["TEAM_KEY"] == "s"
    secret = security_pb2.Secret(key="other", env_var="OTHER")
    spec.task_template.security_context.secrets.append(secret)
    with pytest.raises(MissingSecretError, match="other"):
        pod_of(action_of(spec), AROUND)


class Gone(Exception):  # noqa: N818  # the error of the API's client for a 404
    status = 404


class WrittenApi:
    """An API that replies from a list of phases, and records the requests."""

    def __init__(self, *phases: str, code: int = 0) -> None:
        self.phases, self.code = list(phases), code
        self.created: list[dict[str, Any]] = []
        self.deleted: list[tuple[str, str, int]] = []

    def create_namespaced_pod(self, namespace: str, body: dict[str, Any]) -> Any:
        assert namespace == body["metadata"]["namespace"]
        self.created.append(body)

    def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        if self.deleted:
            raise Gone
        phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
        ended = SimpleNamespace(exit_code=self.code)
        state = SimpleNamespace(terminated=ended if phase in {"Succeeded", "Failed"} else None)
        statuses = [SimpleNamespace(state=state)]
        return SimpleNamespace(status=SimpleNamespace(phase=phase, container_statuses=statuses))

    def read_namespaced_pod_log(self, name: str, namespace: str, container: str) -> str:
        return f"log of {container}\n"

    def delete_namespaced_pod(
        self, name: str, namespace: str, *, grace_period_seconds: int
    ) -> object:
        self.deleted.append((name, namespace, grace_period_seconds))
        return None


async def test_a_pod_is_created_watched_read_and_deleted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.plane.pods._LOOK_S", 0.01)
    api = WrittenApi("Pending", "Running", "Running", "Failed", code=3)
    manifest = pod_of(action_of(spec_with_container()), AROUND)
    pod = await KubePods(api, namespace="elsewhere").start(manifest)
    assert api.created == [
        {**manifest, "metadata": {**manifest["metadata"], "namespace": "elsewhere"}}
    ]
    await pod.running()
    assert await pod.log_from(4) == b"of primary\n"
    assert await pod.ended() == 3
    assert pod.is_over
    await pod.end(20)
    assert api.deleted == [("run-a0-0", "elsewhere", 20)]
    assert await pod.log_from(0) == b"log of primary\n"


class ScriptedApi(WrittenApi):
    """An API that replies with written states of the container, one after the other."""

    def __init__(self, *states: dict[str, Any], phase: str = "Pending") -> None:
        super().__init__(phase)
        self.states = list(states)

    def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        if self.deleted:
            raise Gone
        shown = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        status = {
            "phase": shown.get("phase", "Pending"),
            "conditions": shown.get("conditions", []),
            "reason": shown.get("reason"),
            "message": shown.get("message"),
            "containerStatuses": [
                {"name": "primary", "image": "i", "imageID": "", "ready": False,
                 "restartCount": 0, "state": shown.get("state", {})}
            ],
        }  # fmt: skip
        return ApiClient().deserialize(json.dumps({"status": status}), "V1Pod", "application/json")


async def test_the_reasons_of_a_real_pod_become_notes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.plane.pods._LOOK_S", 0.01)
    unschedulable = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available",
    }  # fmt: skip
    pull = {"reason": "ErrImagePull", "message": "not found"}
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    api = ScriptedApi(
        {"conditions": [unschedulable]},
        {"state": {"waiting": {"reason": "ContainerCreating"}}},
        {"state": {"waiting": pull}},
        {"state": {"waiting": pull}},
        {"phase": "Running", "state": {"running": {}}},
        {"phase": "Failed", "state": {"terminated": killed}},
    )
    pod = await KubePods(api).start(pod_of(action_of(spec_with_container()), AROUND))
    await pod.running()
    assert [waiting_reason([note])[0] for note in pod.notes] == ["Unschedulable", "ErrImagePull"]
    assert await pod.ended() == 137
    assert pod.notes[-1] == ("OOMKilled", "container ended with 137: OOMKilled")


async def test_a_deleted_pod_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.plane.pods._LOOK_S", 0.01)
    api = WrittenApi("Running")
    pod = await KubePods(api).start(pod_of(action_of(spec_with_container()), AROUND))
    api.delete_namespaced_pod(pod.name, pod.namespace, grace_period_seconds=0)
    assert await pod.ended() == 137


async def test_a_change_wakes_all_watchers():
    state, action = State(), action_of(spec_with_container())
    change = state.next_change()
    state.begin_attempt(action)
    assert change.is_set()
    assert not state.next_change().is_set()
    assert action.phases == ["QUEUED"]
