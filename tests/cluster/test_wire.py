"""Tier 0: the content of a deployment, without a control plane."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import flyte
import pytest
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from google.protobuf.json_format import MessageToDict
from kubernetes.client import ApiClient

from union import sandbox as sb
from union.sandbox.cluster._resolver import SandboxResolver

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "UPDATE_GOLDEN"
"""With this variable set, the files are written instead of compared."""
COMBINATIONS = [
    (mode, runtime, cap, gpu)
    for mode, runtime, cap, gpu in itertools.product(
        ("userns", "bwrap"), ("container", "gvisor"), (None, True, False), (0, 1)
    )
    if mode == "bwrap" or not gpu
]


def called(mode: str, runtime: str, cap: object, gpu: int) -> str:
    words = {None: "default", True: "granted", False: "withheld"}
    return "-".join(["golden", mode, runtime, words[cap], "gpu" if gpu else "cpu"])


def environment(
    mode: str, runtime: str, cap: object, gpu: int, **more: Any
) -> sb.SandboxEnvironment:
    return sb.SandboxEnvironment(
        name=called(mode, runtime, cap, gpu),
        image="registry.example/sandbox:1",
        resources=flyte.Resources(cpu=2, memory="4Gi", **({"gpu": "L4:1"} if gpu else {})),
        sandbox_mode=mode,
        runtime=runtime,
        sys_cap_admin=cap,
        **more,
    )


def wire(made: sb.SandboxEnvironment) -> dict[str, Any]:
    context = SerializationContext(version="v1", root_dir=Path("/"))
    return MessageToDict(translate_task_to_wire(made.server_task, context))


def whole(value: Any) -> Any:
    """Convert the floats of a Struct to integers where they are whole, as a cluster does."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def pod_of(made: sb.SandboxEnvironment) -> dict[str, Any]:
    template = wire(made)["taskTemplate"]
    pod = whole(template["k8sPod"])
    primary = pod["podSpec"]["containers"][0]
    # The arguments before it belong to the SDK and change with its version.
    primary["args"] = primary["args"][primary["args"].index("--resolver") :]
    return {
        "timeout": template["metadata"]["timeout"],
        "deadline": template["metadata"]["timeouts"]["deadline"],
        "extendedResources": template.get("extendedResources", {}),
        **pod,
    }


@pytest.mark.spec("I6")
@pytest.mark.parametrize("mode, runtime, cap, gpu", COMBINATIONS)
def test_the_pod_matches_its_golden_file_and_the_kubernetes_api(mode, runtime, cap, gpu):
    found = pod_of(environment(mode, runtime, cap, gpu))
    path = GOLDEN / f"{called(mode, runtime, cap, gpu)}.json"
    if os.environ.get(UPDATE):
        path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    assert found == json.loads(path.read_text())

    client = ApiClient()
    body = {"metadata": found["metadata"], "spec": found["podSpec"]}
    read = client.deserialize(json.dumps(body), "V1Pod", "application/json")
    # The client's models drop unknown fields, so nothing may be missing.
    assert client.sanitize_for_serialization(read) == without_empty(body)


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(item) for key, item in value.items() if item is not None}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


@pytest.mark.spec("I6", "J")
@pytest.mark.parametrize("runtime", ["container", "gvisor"])
def test_a_gpu_without_bwrap_is_refused_when_the_environment_is_declared(runtime):
    with pytest.raises(sb.SandboxUsageError, match="sandbox_mode='userns' shows no GPU") as caught:
        environment("userns", runtime, None, 1)
    assert caught.value.argument == "resources"
    assert environment("bwrap", runtime, None, 1).resources.gpu, "the control"


@pytest.mark.spec("I6")
def test_the_service_account_is_the_pods_and_its_token_is_not_mounted():
    made = environment("userns", "container", None, 0, service_account="sandboxes")
    template = wire(made)["taskTemplate"]
    assert template["securityContext"]["runAs"]["k8sServiceAccount"] == "sandboxes"
    assert whole(template["k8sPod"])["podSpec"]["automountServiceAccountToken"] is False


def test_every_combination_has_a_golden_file_and_no_other_exists():
    assert {path.stem for path in GOLDEN.iterdir()} == {called(*one) for one in COMBINATIONS}


@pytest.mark.spec("I6")
@pytest.mark.parametrize("mode, runtime, cap, gpu", COMBINATIONS)
def test_a_pod_is_granted_what_its_mode_needs_and_never_more(mode, runtime, cap, gpu):
    spec = pod_of(environment(mode, runtime, cap, gpu))["podSpec"]
    primary = spec["containers"][0]
    security = primary["securityContext"]
    granted = cap if cap is not None else mode == "bwrap"
    assert security.get("capabilities") == ({"add": ["SYS_ADMIN"]} if granted else None)
    assert ("appArmorProfile" in security) == granted
    assert ("seccompProfile" in security) == (granted and mode == "bwrap")
    assert security["allowPrivilegeEscalation"] is False
    assert "privileged" not in security
    assert spec.get("runtimeClassName") == ("gvisor" if runtime == "gvisor" else None)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC", "volumes"))
    assert spec["activeDeadlineSeconds"] > 86400


@pytest.mark.spec("I4", "I6")
def test_the_timeout_is_at_most_a_day_and_nothing_is_retried():
    metadata = wire(sb.DEFAULT_SANDBOX_ENV)["taskTemplate"]["metadata"]
    assert metadata["timeout"] == metadata["timeouts"]["deadline"] == "86400s"
    assert metadata["retries"] == {}
    assert not metadata.get("discoverable")


@pytest.mark.spec("I6")
def test_the_defaults_have_their_name_and_mode():
    names = {
        sb.DEFAULT_SANDBOX_ENV.name: sb.DEFAULT_SANDBOX_ENV.sandbox_mode,
        sb.DEFAULT_SANDBOX_ENV_BWRAP.name: sb.DEFAULT_SANDBOX_ENV_BWRAP.sandbox_mode,
    }
    assert names == {"union-sandbox": "userns", "union-sandbox-bwrap": "bwrap"}
    for made in (sb.DEFAULT_SANDBOX_ENV, sb.DEFAULT_SANDBOX_ENV_BWRAP):
        assert isinstance(made.task_env, flyte.Environment)
        assert list(made.tasks) == [f"{made.name}.sandbox_server"]


@pytest.mark.spec("I6")
def test_variables_and_secrets_of_the_environment_are_forwarded():
    made = sb.SandboxEnvironment(
        name="golden-forward",
        image="registry.example/sandbox:1",
        secrets=[flyte.Secret(group="hf", key="HF_TOKEN")],
        env_vars={"HF_HOME": "/tmp/hf"},
    )
    assert made.forwarded == ("HF_HOME", "HF_HF_TOKEN")
    args = pod_of(made)["podSpec"]["containers"][0]["args"]
    assert args[-6:] == [
        "environment", "golden-forward", "mode", "userns", "forward", "HF_HOME,HF_HF_TOKEN",
    ]  # fmt: skip
    template = wire(made)["taskTemplate"]
    assert template["securityContext"]["secrets"][0]["key"] == "HF_TOKEN"


@pytest.mark.spec("I6")
def test_a_pod_loads_its_task_from_its_arguments_alone():
    made = sb.SandboxEnvironment(name="golden-loaded", image="x", env_vars={"A": "1"})
    resolver = SandboxResolver()
    assert resolver.import_path == "union.sandbox.cluster._resolver.SandboxResolver"
    loaded = resolver.load_task(resolver.loader_args(made.server_task))
    assert loaded.name == "golden-loaded.sandbox_server"
    assert loaded.parent_env().forwarded == ("A",)
    assert set(loaded.native_interface.inputs) == set(made.server_task.native_interface.inputs)


def test_a_pod_template_imports_kubernetes_only_when_it_is_read():
    import subprocess
    import sys

    code = (
        "import sys, warnings\nwarnings.simplefilter('ignore')\nfrom union import sandbox as sb\n"
        "sb.DEFAULT_SANDBOX_ENV_BWRAP\nprint('kubernetes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.spec("I6")
@pytest.mark.parametrize(
    "change",
    [
        {"sandbox_mode": "bubblewrap"},
        {"runtime": "kata"},
        {"sys_cap_admin": "yes"},
        {"seccomp_profile": "none"},
        {"proc": "bare"},
        {"pod_template": flyte.PodTemplate()},
    ],
)
def test_invalid_environments(change):
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.SandboxEnvironment(name="golden-wrong", image="x", **change)
    assert caught.value.argument == next(iter(change))


@pytest.mark.spec("I6")
def test_one_name_has_one_profile():
    sb.SandboxEnvironment(name="golden-twice", image="x")
    sb.SandboxEnvironment(name="golden-twice", image="y")
    with pytest.raises(sb.SandboxUsageError, match="golden-twice"):
        sb.SandboxEnvironment(name="golden-twice", image="x", sandbox_mode="bwrap")


def test_an_environment_can_be_cloned():
    made = sb.SandboxEnvironment(name="golden-first", image="x", sandbox_mode="bwrap")
    other = made.clone_with("golden-second", env_vars={"A": "1"})
    assert (other.sandbox_mode, other.forwarded) == ("bwrap", ("A",))
    assert list(other.tasks) == ["golden-second.sandbox_server"]


@pytest.mark.spec("I6")
def test_proc_and_seccomp_can_be_chosen():
    made = sb.SandboxEnvironment(
        name="golden-proc", image="x", proc="unmasked", seccomp_profile="RuntimeDefault"
    )
    spec = pod_of(made)["podSpec"]
    security = spec["containers"][0]["securityContext"]
    assert (security["procMount"], spec["hostUsers"]) == ("Unmasked", False)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
