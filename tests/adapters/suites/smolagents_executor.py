"""smolagents' integration tests of its Docker executor, with ours in its place; and an agent."""

import io
import os
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from smolagents import CodeAgent
from smolagents.models import ChatMessage, MessageRole, Model
from smolagents.monitoring import AgentLogger, LogLevel

from union.sandbox.adapters.smolagents import UnionExecutor

# The source distribution lacks these.
for name in ("tests.utils", "tests.utils.markers"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["tests.utils"].__path__ = []
sys.modules["tests.utils.markers"].require_run_all = pytest.mark.skip(reason="a hosted service")
from tests.test_remote_executors import CommonDockerExecutorIntegration

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")


def executor(*packages):
    quiet = AgentLogger(LogLevel.INFO, Console(force_terminal=False, file=io.StringIO()))
    return UnionExecutor(list(packages), quiet, backend=BACKEND)


class TestUnion(CommonDockerExecutorIntegration):
    @pytest.fixture(scope="class")
    def shared(self):
        # pillow and numpy are packages of this environment, which sandboxes can import.
        made = executor()
        yield made
        made.cleanup()

    @pytest.fixture
    def custom_executor(self, shared):
        return shared


class Scripted(Model):
    def __init__(self, *cells):
        super().__init__(model_id="scripted")
        self.cells = list(cells)

    def generate(self, messages, **_):
        text = f"Thought: go on\n<code>\n{self.cells.pop(0)}\n</code>"
        return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def answer(*cells):
    made = executor()
    try:
        agent = CodeAgent(tools=[], model=Scripted(*cells), executor=made)
        return agent.run("go")
    finally:
        made.cleanup()


def test_variables_persist_between_steps():
    assert answer("x = 20", "final_answer(x + 22)") == 42


def test_a_large_answer_arrives_whole():
    assert answer("final_answer('x' * 1_000_000)") == "x" * 1_000_000


def test_the_host_is_out_of_reach(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    assert Path(secret).read_text() == "secret"
    code = f"import os\nfinal_answer(os.path.exists({str(secret)!r}))"
    assert answer(code) is False
