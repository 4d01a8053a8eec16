"""The public face is exactly what is promised: no name more, no name less."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import union.sandbox as sb
from union.sandbox._core.optional_deps import install_hint
from union.sandbox.testing import scripted_session

# The canonical names and their newer spellings.
PROMISED = """
    on_device remote session SandboxSession Session SandboxProcess ExecResult
    SandboxError SandboxExecutionError SandboxCommandError BackendUnavailableError
    SessionClosedError PolicyError
    SandboxEnvironment DEFAULT_SANDBOX_ENV DEFAULT_SANDBOX_ENV_BWRAP base_sandbox_image
    image_with_sandbox attach
    PIPE INHERIT DEVNULL PYPI_HOSTS CLOUD_METADATA_DENY KUBERNETES_DENY constants errors
    Process Environment DEFAULT_ENV DEFAULT_ENV_BWRAP base_image
""".split()  # noqa: SIM905 (a table of names reads better than a list of strings)

# These live behind an extra. Without it, asking for one must say how to get it.
OF_EXTRAS = """
    SandboxEnvironment Environment base_sandbox_image base_image image_with_sandbox
    DEFAULT_SANDBOX_ENV DEFAULT_ENV DEFAULT_SANDBOX_ENV_BWRAP DEFAULT_ENV_BWRAP
""".split()  # noqa: SIM905 (as above)

ALIASES = [
    ("Process", "SandboxProcess"),
    ("Environment", "SandboxEnvironment"),
    ("DEFAULT_ENV", "DEFAULT_SANDBOX_ENV"),
    ("DEFAULT_ENV_BWRAP", "DEFAULT_SANDBOX_ENV_BWRAP"),
    ("base_image", "base_sandbox_image"),
]

# What Python itself leaves in a module that is written in the house style.
LEFT_BY_THE_LANGUAGE = {"Any", "TYPE_CHECKING", "annotations", "importlib"}

# In a fresh process, because an import anywhere else binds submodules to the package.
PROGRAM = """\
import json
import union.sandbox as sb
print(json.dumps([n for n in [*dir(sb), None, *vars(sb)] if n is None or n[0] != "_"]))
"""

WITHOUT_FLYTE = """\
import json, sys
sys.modules["flyte"] = None
import union.sandbox as sb
errors = {}
for name in sys.argv[1:]:
    try:
        getattr(sb, name)
    except sb.SandboxError as exc:
        errors[name] = [type(exc).__name__, exc.hint]
print(json.dumps(errors))
"""


def resolve(name: str) -> object:
    """Return the object, or None if its extra is missing and the error names it."""
    try:
        return getattr(sb, name)
    except (sb.SandboxError, ImportError) as exc:
        message = str(exc)
    assert name in OF_EXTRAS, f"{name} belongs to a bare install, but: {message}"
    assert "pip install" in message
    assert "pip install '.[" in message
    return None


@pytest.fixture(scope="module")
def fresh_names() -> tuple[list[str], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True, timeout=30
    )
    names = json.loads(done.stdout)
    border = names.index(None)
    return names[:border], set(names[border + 1 :])


def test_dir_shows_exactly_the_public_names(fresh_names):
    listed, _ = fresh_names
    assert sorted(listed) == sorted(sb.__all__)


def test_nothing_public_is_there_by_accident(fresh_names):
    _, bound = fresh_names
    assert bound - LEFT_BY_THE_LANGUAGE <= set(sb.__all__)


def test_no_name_is_listed_twice():
    assert len(sb.__all__) == len(set(sb.__all__))


@pytest.mark.spec("A3")
@pytest.mark.parametrize("name", PROMISED)
def test_promised_name_is_public(name: str):
    assert name in sb.__all__
    assert getattr(sb, name) is not None


@pytest.mark.spec("A2", "A3")
def test_without_the_extra_a_name_of_it_says_how_to_get_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLYTE, *OF_EXTRAS],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    errors = json.loads(done.stdout)
    assert set(errors) == set(OF_EXTRAS)
    assert {hint for _, hint in errors.values()} == {install_hint("flyte")}
    assert {kind for kind, _ in errors.values()} == {"MissingExtraError"}


@pytest.mark.spec("A2", "A3")
@pytest.mark.parametrize("name", sorted(sb.__all__))
def test_public_name_resolves_or_names_its_extra(name: str):
    resolve(name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        sb.no_such_name  # noqa: B018 (the access is the test)


@pytest.mark.parametrize("name", sorted(sb.__all__))
def test_public_class_or_function_is_documented_and_of_the_public_module(name: str):
    found = resolve(name)
    if inspect.isclass(found) or inspect.isroutine(found):
        assert found.__module__ == "union.sandbox"
        # Its own: the one that a class inherits describes another class.
        assert (vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__) or ""


@pytest.mark.spec("A3")
@pytest.mark.parametrize("alias, name", ALIASES)
def test_newer_spelling_is_the_same_object(alias: str, name: str):
    assert resolve(alias) is resolve(name)


@pytest.mark.spec("A3")
def test_newer_spellings_inside_modules():
    assert sb.errors.ExecutionError is sb.SandboxExecutionError
    assert sb.errors.CommandError is sb.SandboxCommandError
    assert sb.constants.PYPI_HOSTS is sb.PYPI_HOSTS
    assert issubclass(sb.SandboxExecutionError, sb.SandboxError)


async def test_a_process_has_no_public_method_for_transports():
    async with scripted_session({"x": ""}) as sbx:
        process = await sbx.run("x")
    assert {name for name in dir(process) if not name.startswith("_")} == {
        *("backend", "isolation", "pid", "returncode", "exit_code", "runtime_ms"),
        *("termination_reason", "usage", "network", "requests", "truncated", "stdin"),
        *("send_signal", "terminate", "kill", "resize", "wait", "communicate", "communicate_text"),
        *("iter_stdout", "iter_stderr", "iter_stdout_lines", "iter_stderr_lines", "result"),
    }
