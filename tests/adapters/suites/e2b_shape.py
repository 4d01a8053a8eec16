"""The E2B-shaped facade: names and arguments are compared with the SDK, behaviour is tested."""

import inspect
import os

import e2b_code_interpreter as sdk
import pytest

from union.sandbox.adapters import e2b as ours

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
NOT_HERE = {"user", "request_timeout", "opts", "self"}


@pytest.fixture(scope="module")
def box():
    with ours.Sandbox.create(backend=BACKEND, envs={"GIVEN": "value"}) as made:
        yield made


@pytest.mark.parametrize("name", ["run_code", "create_code_context"])
def test_arguments_are_those_of_the_sdk(name):
    theirs = set(inspect.signature(getattr(sdk.AsyncSandbox, name)).parameters) - NOT_HERE
    assert set(inspect.signature(getattr(ours.AsyncSandbox, name)).parameters) - {"self"} == theirs


@pytest.mark.parametrize("part", ["commands", "files"])
def test_calls_of_each_part_exist_in_the_sdk(part):
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    theirs = {"commands": Commands, "files": Filesystem}[part]
    here = {"commands": ours._Commands, "files": ours._Filesystem}[part]
    for name, function in inspect.getmembers(here, inspect.isfunction):
        if name.startswith("_"):
            continue
        known = set(inspect.signature(getattr(theirs, name)).parameters)
        assert set(inspect.signature(function).parameters) <= known | {"self"}, name


@pytest.mark.parametrize("name", ["Execution", "Result", "Logs", "ExecutionError"])
def test_fields_of_results_exist_in_the_sdk(name):
    theirs = getattr(sdk, name, None) or getattr(sdk.models, name)
    text = inspect.getsource(theirs)
    for field in getattr(ours, name).__dataclass_fields__:
        assert field in text, field


def test_a_command_returns_its_output(box):
    seen = []
    done = box.commands.run("echo out; echo err >&2; echo $GIVEN", on_stdout=seen.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nvalue\n", "err\n", 0)
    assert "".join(seen) == "out\nvalue\n"


def test_a_failure_raises(box):
    with pytest.raises(ours.CommandExitException) as caught:
        box.commands.run("echo no >&2; exit 3")
    assert (caught.value.exit_code, caught.value.stderr) == (3, "no\n")
    with pytest.raises(ours.TimeoutException):
        box.commands.run("sleep 60", timeout=0.5)


def test_a_background_command(box):
    handle = box.commands.run("read line; echo got $line", background=True, stdin=True)
    handle.send_stdin("it\n")
    assert handle.wait().stdout == "got it\n"
    endless = box.commands.run("sleep 99", background=True)
    assert endless.kill() is True


def test_files(box):
    info = box.files.write("d/a.txt", "hello")
    assert (info.name, info.type, info.size, info.path) == (
        "a.txt",
        "file",
        5,
        "/workspace/d/a.txt",
    )
    assert box.files.read("d/a.txt") == "hello"
    assert box.files.read("/workspace/d/a.txt", format="bytes") == bytearray(b"hello")
    assert box.files.make_dir("d/e") is True
    assert box.files.make_dir("d/e") is False
    assert [entry.name for entry in box.files.list("d")] == ["a.txt", "e"]
    assert box.files.rename("d/a.txt", "d/b.txt").name == "b.txt"
    assert box.files.exists("d/a.txt") is False
    box.files.write_files([{"path": "/tmp/x", "data": b"1"}, {"path": "/tmp/y", "data": "2"}])
    assert box.commands.run("cat /tmp/x /tmp/y").stdout == "12"
    box.files.remove("d")
    with pytest.raises(FileNotFoundError):
        box.files.read("d/b.txt")


def test_code_keeps_its_variables(box):
    box.run_code("x = 20")
    done = box.run_code("print('p')\nx + 22")
    assert (done.text, done.logs.stdout, done.error) == ("42", ["p\n"], None)
    assert done.results[0].is_main_result
    failed = box.run_code("1 / 0")
    assert failed.error.name == "ZeroDivisionError"
    assert "ZeroDivisionError" in failed.error.traceback


def test_contexts_are_separate(box):
    other = box.create_code_context(cwd="/tmp")
    box.run_code("y = 1", context=other)
    assert box.run_code("import os; (y, os.getcwd())", context=other).text == "(1, '/tmp')"
    assert box.run_code("'y' in globals()").text == "False"


def test_an_image_is_base64(box):
    code = "class P:\n    def _repr_png_(self):\n        return b'\\x89PNG'\nP()"
    assert box.run_code(code).results[0].png == "iVBORw=="


def test_life():
    box = ours.Sandbox.create(backend=BACKEND)
    assert box.is_running()
    again = ours.Sandbox.connect(box.sandbox_id)
    box.files.write("x", "1")
    assert again.files.read("x") == "1"
    assert box.kill() is True
    assert not box.is_running()
    assert box.kill() is False


async def test_the_asynchronous_class():
    async with await ours.AsyncSandbox.create(backend=BACKEND) as box:
        assert (await box.commands.run("echo hi")).stdout == "hi\n"
        assert (await box.run_code("6 * 7")).text == "42"
