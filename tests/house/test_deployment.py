"""The deployment files are valid: the unit, the manifests, the container file, the workflow."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import release

from union.sandbox.server._config import _parser as server_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KINDS = {"Deployment": "V1Deployment", "Service": "V1Service", "NetworkPolicy": "V1NetworkPolicy"}


def errors_in(value: Any, kind: str, where: str = "") -> list[str]:
    """Return the differences between a value and a type of the Kubernetes API."""
    models = pytest.importorskip("kubernetes.client.models", reason="pip install --group dev")
    if kind.startswith(("list[", "List[")):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        parts = enumerate(value)
        return [e for n, item in parts for e in errors_in(item, kind[5:-1], f"{where}[{n}]")]
    if kind.startswith(("dict(", "Dict[")):
        inner = kind[5:-1].partition(", ")[2]
        if not isinstance(value, dict):
            return [f"{where}: not a map"]
        return [e for k, item in value.items() for e in errors_in(item, inner, f"{where}.{k}")]
    if kind in {"str", "int", "bool", "float"}:
        wanted: Any = {"str": str, "int": int, "bool": bool, "float": (int, float)}[kind]
        good = isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))
        return [] if good else [f"{where}: {value!r} is no {kind}"]
    model = getattr(models, kind, None)
    if model is None:
        return [] if kind in {"object", "datetime"} else [f"{where}: unknown type {kind}"]
    if not isinstance(value, dict):
        # A quantity or a port may be a number or text.
        return [f"{where}: not an object"]
    names = {wire: name for name, wire in model.attribute_map.items()}
    found = [f"{where}.{key}: no field of {kind}" for key in value if key not in names]
    for key in value.keys() & names.keys():
        found += errors_in(value[key], model.openapi_types[names[key]], f"{where}.{key}")
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pod_of(path: Path) -> dict[str, Any]:
    (found,) = (one for one in documents(path) if one["kind"] == "Deployment")
    return found["spec"]["template"]["spec"]


def test_the_checker_finds_mistakes():
    wrong = {"spec": {"replicas": "1", "selektor": {}, "template": {"spec": {"containers": {}}}}}
    assert sorted(errors_in(wrong, "V1Deployment")) == [
        ".spec.replicas: '1' is no int",
        ".spec.selektor: no field of V1DeploymentSpec",
        ".spec.template.spec.containers: not a list",
    ]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_fit_the_kubernetes_api(path: Path):
    found = documents(path)
    assert {one["kind"] for one in found} == set(KINDS)
    assert [e for one in found for e in errors_in(one, KINDS[one["kind"]])] == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_the_server_accepts_the_arguments_of_a_manifest(path: Path):
    pod = pod_of(path)
    (container,) = pod["containers"]
    options = server_parser().parse_args(container["args"])
    assert options.token_file.startswith("/etc/sandbox/")
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_manifests_are_the_rows_of_the_guide():
    contexts = {p.stem: pod_of(p)["containers"][0]["securityContext"] for p in MANIFESTS}
    profiles = {name: context["seccompProfile"]["type"] for name, context in contexts.items()}
    assert profiles == {
        "localhost-profile": "Localhost",
        "runtime-default": "RuntimeDefault",
        "user-namespaces": "RuntimeDefault",
    }
    assert contexts["user-namespaces"]["capabilities"]["add"] == ["SYS_ADMIN"]
    assert pod_of(DEPLOY / "kubernetes/user-namespaces.yaml")["hostUsers"] is False
    guide = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    assert [path.name for path in MANIFESTS if path.name not in guide] == []


def unit() -> dict[str, str]:
    text = (DEPLOY / "sandbox-server.service").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def test_the_unit_starts_the_server_with_options_that_exist():
    program, *arguments = unit()["ExecStart"].split()
    assert program == "/opt/sandbox/bin/sandbox-server"
    assert server_parser().parse_args(arguments).bind
    assert unit()["NoNewPrivileges"] == "yes"
    assert unit()["CapabilityBoundingSet"] == ""


def test_systemd_accepts_the_unit(tmp_path: Path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text = (DEPLOY / "sandbox-server.service").read_text(encoding="utf-8")
    # The program and its manual page are not installed here.
    text = text.replace("/opt/sandbox/bin/sandbox-server", "/bin/true").replace("man:sbx(1)", "")
    copy = tmp_path / "sandbox-server.service"
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [program, "verify", "--man=no", str(copy)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    copy.write_text(text.replace("[Service]", "[Service]\nNoSuchSetting=1"), encoding="utf-8")
    done = subprocess.run(
        [program, "verify", "--man=no", str(copy)], check=False, capture_output=True, text=True
    )
    assert "NoSuchSetting" in done.stderr, "the check must be able to fail"


def test_the_container_file_uses_what_exists():
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert len(re.findall(r"^FROM \$\{BASE\}", text, re.MULTILINE)) == 2
    command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert command is not None
    assert server_parser().parse_args(yaml.safe_load(command[1])).tls_self_signed
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "dist"} <= set(ignored)


WORKFLOWS = sorted(release.WORKFLOW.parent.glob("*.yml"))


def test_the_workflow_releases_what_is_checked():
    workflow = yaml.safe_load(release.WORKFLOW.read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert jobs["build"]["needs"] == "test"
    assert jobs["publish"]["needs"] == "build"
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "make release-check" in steps
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_every_test(path: Path):
    (test,) = (
        step
        for step in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]["test"]["steps"]
        if step.get("name") == "Test"
    )
    assert test["run"] == "make test-all"


def test_workflows_fit_their_schema_and_a_linter_accepts_them(tmp_path: Path):
    pytest.importorskip("check_jsonschema", reason="pip install --group dist")
    if not Path(sys.executable).with_name("zizmor").exists():
        pytest.skip("zizmor is not installed: pip install --group dist")
    assert all(release.check_workflow(path) for path in WORKFLOWS)
    text = release.WORKFLOW.read_text(encoding="utf-8")
    loose = tmp_path / "release.yml"
    loose.write_text(re.sub(r"checkout@\S+ # \S+", "checkout@v4", text), encoding="utf-8")
    with pytest.raises(release.ReleaseError, match="not pinned"):
        release.check_workflow(loose)
    injected = "run: make release-check ${{ github.event.head_commit.message }}"
    loose.write_text(text.replace("run: make release-check", injected), encoding="utf-8")
    with pytest.raises(release.ReleaseError, match="template-injection"):
        release.check_workflow(loose)


@pytest.mark.parametrize(
    "text, draft, good",
    [
        ("## [Unreleased]\n\n- a\n", True, True),
        ("## [Unreleased]\n\n- a\n", False, False),
        ("## [Unreleased]\n\n## [1.0] - 2026-01-02\n\n- a\n", False, True),
        ("## [Unreleased]\n\n## [1.0]\n\n- a\n", False, False),
        ("## [Unreleased]\n\n## [0.9] - 2026-01-02\n\n- a\n", True, False),
    ],
)
def test_a_release_needs_its_entry(text: str, *, draft: bool, good: bool):
    if good:
        release.check_changelog(text, "1.0", draft=draft)
    else:
        with pytest.raises(release.ReleaseError, match=r"## \[1\.0\]"):
            release.check_changelog(text, "1.0", draft=draft)


def test_the_bill_of_materials_names_every_requirement_and_file(tmp_path: Path):
    file = tmp_path / "x.whl"
    file.write_bytes(b"content")
    bill = release.sbom("1.0", [file], epoch=1_700_000_000)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    names = {component["name"]: component for component in bill["components"]}
    assert {"uv", "aiohttp", "flyte", "x.whl"} <= set(names)
    assert (names["uv"]["scope"], names["aiohttp"]["scope"]) == ("required", "optional")
    assert names["x.whl"]["hashes"][0]["alg"] == "SHA-256"
    assert bill == release.sbom("1.0", [file], epoch=1_700_000_000), "reproducible"


def test_builds_that_differ_are_named(tmp_path: Path):
    for place, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "same").write_bytes(b"x")
        (tmp_path / place / "other").write_bytes(content)
    first, second = ([tmp_path / d / n for n in ("same", "other")] for d in "ab")
    assert release.differences(first, second) == ["other"]
    assert release.differences(first, first) == []
