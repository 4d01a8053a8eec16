"""Errors name the spelling that was probably meant."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from union import sandbox as sb
from union.sandbox._core import literals
from union.sandbox._core.suggestions import near, near_size, unknown_argument

SESSION = sb.on_device.session()


@pytest.mark.spec("C10")
@pytest.mark.parametrize(
    "call, wrong, meant",
    [
        (SESSION.run, "timeout", "timeout_s"),
        (SESSION.exec, "Timeout", "timeout_s"),
        (SESSION.run_code, "timeout_sec", "timeout_s"),
        (SESSION.run, "workdir", "cwd"),
        (SESSION.run, "environment", "env"),
        (SESSION.run, "input", "stdin"),
        (SESSION.run, "network", "network_mode"),
        (SESSION.run, "allowlist", "network_allowlist"),
        (SESSION.exec, "read_only", "read_only_paths"),
        (SESSION.exec, "max_output", "max_output_bytes"),
        (sb.on_device.session, "work_dir", "host_work_dir"),
        (sb.on_device.session, "resource", "resources"),
        (sb.remote.session, "end_point", "endpoint"),
    ],
)
def test_an_unknown_argument_names_the_nearest(call: Any, wrong: str, meant: str) -> None:
    error = unknown_argument(call, {wrong: 1})
    assert f"{call.__name__}()" in str(error)
    assert repr(wrong) in str(error)
    assert error.hint == f"did you mean {meant!r}?"
    assert meant in inspect.signature(call).parameters


def test_an_unknown_argument_without_a_near_one_lists_all() -> None:
    error = unknown_argument(SESSION.exec, {"zzz": 1})
    assert "timeout_s" in error.hint
    assert "check" in error.hint


@pytest.mark.spec("C10", "D8")
def test_an_unknown_argument_is_a_type_error_as_for_any_function() -> None:
    with pytest.raises(TypeError, match="workdir") as caught:
        sb.on_device.session(workdir="/srv")  # type: ignore[arg-type]
    assert isinstance(caught.value, sb.UnknownArgumentError)
    assert isinstance(caught.value, sb.SandboxUsageError)
    assert (caught.value.code, caught.value.argument) == ("unknown-argument", "workdir")
    with pytest.raises(sb.UnknownArgumentError, match="endpoint"):
        sb.remote.session(endpoint="http://h:1", end_points=1)  # type: ignore[arg-type]


@pytest.mark.spec("C10")
@pytest.mark.parametrize(
    "argument, value, meant",
    [
        ("backend", "bwrap", "bubblewrap"),
        ("backend", "Bubblewrap", "bubblewrap"),
        ("backend", "docker", ""),
        ("backend", "user-ns", "userns"),
        ("network_mode", "allow-list", "allowlist"),
        ("network_mode", "none", "blocked"),
        ("network_mode", "off", "blocked"),
        ("network_mode", "host", "open"),
        ("network_mode", "block", "blocked"),
        ("script_type", "bash", "shell"),
        ("script_type", "python3", "python"),
        ("script_type", 3, ""),
    ],
)
def test_a_value_names_the_nearest(argument: str, value: object, meant: str) -> None:
    accepted = {
        "backend": literals.BackendName.__args__,  # type: ignore[attr-defined]
        "network_mode": literals.NetworkMode.__args__,  # type: ignore[attr-defined]
        "script_type": literals.ScriptType.__args__,  # type: ignore[attr-defined]
    }[argument]
    assert near(argument, value, accepted) == (f"did you mean {meant!r}?" if meant else "")


def test_a_value_that_is_not_accepted_here_is_not_suggested() -> None:
    assert near("backend", "bwrap", ("userns",)) == ""


@pytest.mark.spec("C10", "G3")
@pytest.mark.parametrize(
    "value, meant",
    [
        ("512MB", "512Mi"),
        ("512mb", "512Mi"),
        ("1GB", "1Gi"),
        ("1.5 GiB", "1.5Gi"),
        ("65536 kb", "65536Ki"),
        ("2t", "2Ti"),
    ],
)
def test_a_size_names_the_accepted_spelling(value: str, meant: str) -> None:
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.on_device.session(resources=sb.Resources(memory=value))
    assert f'"{meant}"' in caught.value.hint
    assert value in str(caught.value)
    sb.on_device.session(resources=sb.Resources(memory=meant))


def test_a_size_that_is_no_size_has_no_suggestion() -> None:
    assert near_size("lots") == near_size(5) == near_size("5 apples") == ""


@pytest.mark.spec("C10")
def test_resources_as_a_mapping_are_explained() -> None:
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.on_device.session(resources={"memory": "1Gi", "cpu": 2})  # type: ignore[arg-type]
    assert caught.value.hint == "write sb.Resources(memory='1Gi', cpu=2)"


@pytest.mark.spec("C10")
def test_a_path_instead_of_a_list_is_explained() -> None:
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.on_device.session(read_only_paths="/srv/data")
    assert caught.value.hint == "pass a list: read_only_paths=['/srv/data']"


@pytest.mark.spec("C10")
@pytest.mark.parametrize("argument", ["env", "host_work_dir", "resources", "timeout_s", "backend"])
def test_a_forgotten_await_is_explained(argument: str) -> None:
    async def value() -> None: ...

    forgotten = value()
    options: dict[str, Any] = {argument: forgotten}
    with pytest.raises(sb.SandboxUsageError) as caught:
        sb.on_device.session(**options)
    assert "write `await` before" in caught.value.hint
    forgotten.close()


@pytest.mark.spec("A3")
def test_every_error_is_importable_from_errors() -> None:
    for name in sb.__all__:
        if name.endswith("Error"):
            assert getattr(sb.errors, name) is getattr(sb, name)
            assert name in sb.errors.__all__
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = sb.errors.NoSuchError
