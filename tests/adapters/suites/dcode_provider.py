"""The sandbox provider for Deep Agents Code, found by its entry point."""

import os
from importlib.metadata import entry_points

import pytest
from deepagents_code.integrations.sandbox_provider import SandboxNotFoundError, SandboxProvider

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture
def provider():
    (found,) = entry_points(group="deepagents_code.sandbox_providers", name="union")
    return found.load()()


def test_it_is_found_by_name(provider):
    assert isinstance(provider, SandboxProvider)
    assert provider.metadata.name == "union"
    assert provider.metadata.working_dir == "/workspace"


def test_a_sandbox_is_created_found_again_and_deleted(provider):
    made = provider.get_or_create(backend=BACKEND)
    made.execute("echo kept > note")
    again = provider.get_or_create(sandbox_id=made.id)
    assert again.execute("cat note; pwd").output == "kept\n/workspace\n"
    provider.delete(sandbox_id=made.id)
    provider.delete(sandbox_id=made.id)
    with pytest.raises(SandboxNotFoundError):
        provider.get_or_create(sandbox_id=made.id)


async def test_the_asynchronous_calls(provider):
    made = await provider.aget_or_create(backend=BACKEND)
    assert (await made.aexecute("echo 1")).output == "1\n"
    await provider.adelete(sandbox_id=made.id)
