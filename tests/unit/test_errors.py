from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from union import sandbox as sb
from union.sandbox import errors
from union.sandbox._contexts.values import CellResult, ErrorInfo
from union.sandbox._core import file_errors
from union.sandbox._session.result import ExecResult

RESULT = ExecResult(returncode=3, stdout="out", stderr="why\n", termination_reason="signal")
CELL = CellResult(
    number=1, stdout="", stderr="", error=ErrorInfo(name="KeyError", value="x", traceback="why")
)
SAMPLES = {
    "SandboxError": errors.SandboxError("m", code="special", hint="h"),
    "SandboxUsageError": errors.SandboxUsageError("m", argument="a", hint="h"),
    "PolicyError": errors.PolicyError("m", argument="network_mode", code="x"),
    "SessionClosedError": errors.SessionClosedError("m"),
    "UnknownArgumentError": errors.UnknownArgumentError("m", argument="timeout", hint="h"),
    "MissingExtraError": errors.MissingExtraError("m", hint="h"),
    "BackendUnavailableError": errors.BackendUnavailableError(
        "m", backend="userns", missing=["a", "b"], hint="h"
    ),
    "SandboxExecutionError": errors.SandboxExecutionError(
        "m", backend="none", runtime_ms=1.5, stage="stream", code="c", hint="h"
    ),
    "SandboxConnectionError": errors.SandboxConnectionError("m", endpoint="e", sent=True, hint="h"),
    "SandboxCommandError": errors.SandboxCommandError(["a", "b"], RESULT),
    "SandboxBusyError": errors.SandboxBusyError(2, ("a", "b")),
    "SandboxCellError": errors.SandboxCellError(CELL),
    "ContextLostError": errors.ContextLostError("the interpreter has ended", hint="restart()"),
    **{
        name: getattr(file_errors, name)("m", path="p", hint="h")
        for name in file_errors.__all__
        if name.startswith("Sandbox")
    },
}


def classes() -> dict[str, type]:
    values = [*(getattr(errors, name) for name in errors.__all__), *vars(file_errors).values()]
    found = [v for v in values if inspect.isclass(v) and issubclass(v, errors.SandboxError)]
    return {cls.__name__: cls for cls in found}


@pytest.mark.spec("D7", "D8")
def test_there_is_a_sample_of_every_class():
    assert set(SAMPLES) == set(classes())


@pytest.mark.spec("D7")
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_each_pickles_with_all_it_carries(name, protocol):
    exc = SAMPLES[name]
    again = pickle.loads(pickle.dumps(exc, protocol))
    assert type(again) is type(exc)
    assert again.args == exc.args
    assert again.__dict__ == exc.__dict__
    assert str(again) == str(exc)
    assert again.code == exc.code


@pytest.mark.spec("D7")
@pytest.mark.parametrize("name", SAMPLES)
def test_each_copies(name):
    again = copy.deepcopy(SAMPLES[name])
    assert (str(again), again.__dict__) == (str(SAMPLES[name]), SAMPLES[name].__dict__)


@pytest.mark.spec("D8")
@pytest.mark.parametrize("name", SAMPLES)
def test_each_is_a_sandbox_error_with_a_code_of_its_own(name):
    exc = SAMPLES[name]
    assert isinstance(exc, sb.SandboxError)
    assert exc.code
    assert isinstance(exc.hint, str)
    codes = [cls.code for cls in classes().values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.spec("D8")
def test_a_hint_is_shown_below_the_message():
    assert str(errors.SandboxError("message", hint="do this")) == "message\nhint: do this"
    assert str(errors.SandboxError("message")) == "message"


@pytest.mark.spec("C10", "D8")
def test_usage_errors_are_value_errors():
    assert issubclass(sb.SandboxUsageError, ValueError)
    assert issubclass(sb.PolicyError, sb.SandboxUsageError)
    assert issubclass(sb.SessionClosedError, sb.SandboxError)


@pytest.mark.spec("D4")
def test_an_execution_error_has_the_reserved_code():
    exc = errors.SandboxExecutionError("why")
    assert (exc.reason, exc.returncode, exc.stage) == ("why", -1, "spawn")
    lost = errors.SandboxConnectionError("why")
    assert (lost.stage, lost.returncode, lost.sent) == ("transport", -1, False)


@pytest.mark.spec("D5")
def test_a_command_error_says_what_and_why_in_bounds():
    exc = errors.SandboxCommandError("do it", RESULT)
    assert str(exc) == "command ended with 3 (signal): do it\nwhy"
    assert (exc.cmd, exc.result) == ("do it", RESULT)
    long = ExecResult(returncode=1, stdout="", stderr="e" * 100_000)
    assert len(str(errors.SandboxCommandError("c" * 100_000, long))) < 3000


@pytest.mark.spec("A3")
def test_the_peers_spellings_are_the_same_classes():
    assert errors.ExecutionError is errors.SandboxExecutionError
    assert errors.CommandError is errors.SandboxCommandError
