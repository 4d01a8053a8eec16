"""Every argument of session() is checked before anything is started."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from types import SimpleNamespace

import pytest

from union.sandbox import Resources, SandboxUsageError
from union.sandbox.cluster._request import Request, resolve_request

USUAL = {
    "environment": None,
    "name": None,
    "timeout": timedelta(hours=1),
    "timeout_s": None,
    "project": None,
    "domain": None,
    "service_account": None,
    "resources": None,
    "network_mode": "blocked",
    "network_allowlist": None,
    "network_denylist": None,
    "sandbox_mode": None,
    "backend": None,
    "ready_timeout": timedelta(minutes=3),
    "owner_lease": None,
}


def asked(**changes: object) -> Request:
    return resolve_request(**{**USUAL, **changes})


def environment(**changes: object) -> SimpleNamespace:
    known = {"name": "mine", "sandbox_mode": "userns", "resources": None, "env_vars": None}
    made = SimpleNamespace(**{**known, **changes})
    made.task_env = made
    return made


@pytest.mark.spec("I4")
def test_the_defaults():
    found = asked()
    assert found.name.startswith("sbx-")
    assert len(found.name) == 4 + 16
    int(found.name[4:], 16)
    assert found.environment == "union-sandbox"
    assert (found.backend, found.overrides_mode) == ("userns", False)
    assert found.timeout_s == 3600.0
    assert found.session()["network_mode"] == "blocked"
    assert asked().name != found.name


def test_the_mode_selects_the_default_environment():
    found = asked(sandbox_mode="bwrap")
    assert (found.environment, found.backend) == ("union-sandbox-bwrap", "bubblewrap")
    assert not found.overrides_mode


def test_an_environment_brings_its_own_mode_and_variables():
    found = asked(environment=environment(sandbox_mode="bwrap", env_vars={"A": "1"}))
    assert (found.environment, found.backend, found.overrides_mode) == ("mine", "bubblewrap", False)
    assert found.session(env=found.env_vars)["env"] == {"A": "1"}
    over = asked(environment=environment(), sandbox_mode="bwrap")
    assert (over.environment, over.backend, over.overrides_mode) == ("mine", "bubblewrap", True)
    assert asked(environment="by-name").environment == "by-name"


@pytest.mark.spec("I4", "J")
@pytest.mark.parametrize(
    "change",
    [
        {"environment": 3},
        {"environment": ""},
        {"name": "Upper"},
        {"name": "-x"},
        {"name": "x" * 31},
        {"name": ""},
        {"timeout": 0},
        {"timeout": timedelta(0)},
        {"timeout": timedelta(hours=24, seconds=1)},
        {"timeout": None},
        {"timeout": "1h"},
        {"timeout": True},
        {"project": 1},
        {"domain": ""},
        {"resources": {"cpu": 1}},
        {"resources": Resources(gpu=1)},
        {"network_mode": "half"},
        {"network_mode": "allowlist"},
        {"network_allowlist": ["example.com"]},
        {"network_denylist": ["10.0.0.0/8"]},
        {"sandbox_mode": "bubblewrap"},
        {"ready_timeout": -1},
    ],
)
def test_an_error_names_its_argument(change):
    with pytest.raises(SandboxUsageError) as caught:
        asked(**change)
    assert caught.value.argument == next(iter(change)) or "network" in caught.value.argument


@pytest.mark.spec("J", "I6")
def test_a_gpu_requires_bwrap():
    with pytest.raises(SandboxUsageError, match="GPU"):
        asked(environment=environment(resources=Resources(gpu=1)))
    found = asked(environment=environment(resources=Resources(gpu=1), sandbox_mode="bwrap"))
    assert found.spec.limits.gpus == 1


def test_flytes_resources_are_accepted_and_some_memory_is_reserved():
    import flyte

    found = asked(resources=flyte.Resources(cpu=2, memory="1Gi"))
    assert found.spec.limits.cpus == 2
    assert found.spec.limits.memory_bytes == 1024 * 2**20 - 128 * 2**20
    small = asked(resources=Resources(memory="64Mi"))
    assert small.spec.limits.memory_bytes == 48 * 2**20


def test_the_timeout_is_at_most_a_day():
    assert asked(timeout=timedelta(hours=24)).timeout_s == 86400.0
    assert asked(timeout=1.5).timeout_s == 1.5


def test_a_request_is_a_value():
    found = asked()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "other"


@pytest.mark.parametrize("value", [0, -1, 0.5, "1h", True, timedelta(milliseconds=999)])
def test_invalid_leases(value: object):
    with pytest.raises(SandboxUsageError, match="owner_lease") as caught:
        asked(owner_lease=value)
    assert caught.value.argument == "owner_lease"


def test_a_lease_is_optional():
    assert asked().owner_lease_s is None
    assert asked(owner_lease=timedelta(minutes=5)).owner_lease_s == 300
    assert asked(owner_lease=1).owner_lease_s == 1
