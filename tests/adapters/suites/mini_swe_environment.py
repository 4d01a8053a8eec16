"""The environment protocol of mini-swe-agent."""

import os

import pytest
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted

from union.sandbox.adapters.mini_swe_agent import UnionEnvironment

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(scope="module")
def environment():
    made = UnionEnvironment(backend=BACKEND, env={"GIVEN": "value"})
    yield made
    made.cleanup()


def test_output_is_merged_in_order(environment):
    done = environment.execute({"command": "echo out; echo err >&2; echo $GIVEN; exit 3"})
    assert done == {"output": "out\nerr\nvalue\n", "returncode": 3, "exception_info": ""}


def test_a_timeout_is_a_result(environment):
    done = environment.execute({"command": "echo begun; sleep 60"}, timeout=1)
    assert done["returncode"] == -1
    assert done["output"] == "begun\n"
    assert done["extra"]["exception_type"] == "TimeoutExpired"


def test_files_persist_and_a_missing_directory_is_a_result(environment):
    environment.execute({"command": "echo kept > /tmp/x; mkdir -p sub"})
    assert environment.execute({"command": "cat /tmp/x; pwd"}, cwd="sub")["output"] == (
        "kept\n/workspace/sub\n"
    )
    assert environment.execute({"command": "true"}, cwd="/nowhere")["returncode"] == -1


def test_the_last_command_submits(environment):
    with pytest.raises(Submitted) as caught:
        environment.execute({"command": f"echo {SUBMIT}; echo answer"})
    assert "answer" in str(vars(caught.value))


def test_a_directory_of_the_caller_is_the_work_dir(tmp_path):
    made = UnionEnvironment(backend=BACKEND, cwd=str(tmp_path))
    made.execute({"command": "echo mine > file"})
    made.cleanup()
    assert (tmp_path / "file").read_text() == "mine\n"


def test_variables_of_the_caller_are_not_visible(environment, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    assert "SECRET_OF_THE_CALLER" not in environment.execute({"command": "env"})["output"]
    assert "SECRET_OF_THE_CALLER" not in str(environment.get_template_vars())


def test_a_dotted_path_selects_it():
    kind = "union.sandbox.adapters.mini_swe_agent.UnionEnvironment"
    made = get_environment({"environment_class": kind, "backend": BACKEND})
    assert type(made) is UnionEnvironment
    assert kind in str(made.serialize())
