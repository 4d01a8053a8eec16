"""Inspect's portable checks for sandbox environments, its injected tools, and discovery."""

import os

import pytest
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *

from union.sandbox.adapters.inspect_ai import UnionSandboxConfig, UnionSandboxEnvironment

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture
async def sandbox_env():
    found = await UnionSandboxEnvironment.sample_init("judge", {"backend": BACKEND}, {})
    yield next(iter(found.values()))
    await UnionSandboxEnvironment.sample_cleanup("judge", None, found, False)


async def test_injected_tools_run(sandbox_env):
    # They put a server below /var/tmp and keep it running.
    proxy = SandboxEnvironmentProxy(sandbox_env)
    result = await proxy.exec_remote(["sh", "-c", "echo hi; sleep 1; echo there"], stream=False)
    assert (result.success, result.stdout.split()) == (True, ["hi", "there"])


def test_the_entry_point_is_found_by_name():
    assert registry_find_sandboxenv("union") is UnionSandboxEnvironment


def test_a_configuration_survives_a_log():
    config = UnionSandboxConfig(backend="userns", network_mode="blocked")
    assert UnionSandboxEnvironment.config_deserialize(config.model_dump()) == config
