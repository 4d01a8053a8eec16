"""Pydantic AI's ``WorkspaceBackendSuite``, with the rules that need attach and destroy."""

import os
import time

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from union.sandbox import sync
from union.sandbox.adapters.pydantic_ai import UnionSandbox, UnionSandboxBackend

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


@pytest.fixture
def anyio_backend():
    return "asyncio"


class TestUnion(WorkspaceBackendSuite):
    @pytest.fixture(scope="class")
    def shared(self):
        with sync.on_device.session(**options()) as session:
            yield session

    @pytest.fixture
    def backend(self, shared):
        return UnionSandboxBackend(session=shared)

    @pytest.fixture
    def fresh_backend(self):
        return lambda: UnionSandboxBackend(backend=BACKEND)

    @pytest.fixture
    def attach_backend(self):
        return lambda ref: UnionSandboxBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self):
        return lambda backend: UnionSandbox().destroy(backend.ref)

    # The suite accepts a child that was killed, after a wait of 30 s.
    async def test_background_child_does_not_hold_up_completed_command(
        self, backend, has_real_posix_shell, can_detect_exit_with_inherited_output_pipes
    ):
        began = time.monotonic()
        await super().test_background_child_does_not_hold_up_completed_command(
            backend, has_real_posix_shell, can_detect_exit_with_inherited_output_pipes
        )
        assert time.monotonic() - began < 25, "the background child did not survive its command"


def options():
    from union.sandbox.adapters._common import session_options

    return session_options({"backend": BACKEND})


async def test_a_run_gets_a_new_workspace_and_a_reference_attaches():
    capability = UnionSandbox(backend=BACKEND)
    first = capability.get_workspace(None, ref=None)
    assert first.ref is None
    assert (await first.run("echo kept > x; pwd", shell=True)).stdout == "/workspace\n"
    again = capability.get_workspace(None, ref=first.ref)
    assert (await again.run(["cat", "x"])).stdout == "kept\n"
    assert capability.get_workspace(None, ref=WorkspaceRef(provider="other", id="x")) is None
    await capability.destroy(first.ref)
    with pytest.raises(WorkspaceUnavailableError):
        await again.run(["true"])
    with pytest.raises(WorkspaceUnavailableError):
        await capability.workspace(first.ref).working_dir()


def test_an_agent_accepts_the_capability_without_opening_a_sandbox():
    def model(messages, info):
        return ModelResponse(parts=[TextPart("done")])

    agent = Agent(FunctionModel(model), capabilities=[UnionSandbox(backend=BACKEND)])
    assert agent.run_sync("go").output == "done"
