"""`make test`, `make test-all` and `make check`: what they report, and when they fail."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import pytest
from scripts import check, steps
from scripts import test as runner
from tests import conftest, tiers

if TYPE_CHECKING:
    from pathlib import Path

GOOD = "def test_good(): ...\n"
BAD = "def test_bad():\n    raise AssertionError('the reason')\n"
FLAKY = """
from pathlib import Path

def test_flaky():
    second = Path("second")
    if not second.exists():
        second.touch()
        raise AssertionError
"""
ELSEWHERE = "tests/environments/test_suite_elsewhere.py"
SLOW = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, with no plugin but the one that is needed: each takes time to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.delenv(runner.KEEP, raising=False)  # the reports are those of the outer run
    markers = "".join(f"    {mark}: x\n" for mark in ("alone", "elsewhere", tiers.REPEATED))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.setattr(
        runner, "LAST_FAILED", tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    )
    parallel = [
        "2" if option == runner.WORKERS else option for option in runner.RUNS[runner.PARALLEL]
    ]
    monkeypatch.setitem(runner.RUNS, runner.PARALLEL, parallel)
    return tmp_path


def run(project: Path, capfd: pytest.CaptureFixture[str], **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (project / f"test_{name}.py").write_text(text)
    code = runner.main(["."])
    return code, capfd.readouterr().out


def last_line(shown: str) -> str:
    return shown.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(240)  # each of these starts several runs of pytest, one after the other
def test_passed_and_skipped_tests_are_counted(project: Path, capfd):
    alone = "import pytest\n@pytest.mark.alone\ndef test_alone(): ...\n"
    skipped = "import pytest\ndef test_skipped():\n    pytest.skip('why')\n"
    repeated = alone.replace("alone", tiers.REPEATED)  # for the complete run
    code, shown = run(project, capfd, a=GOOD, b=alone, c=skipped, d=repeated)
    assert code == 0
    assert re.fullmatch(r"=== 2 passed, 1 skipped in \d+s ===", last_line(shown))
    assert "flaky" not in shown
    assert "failed" not in shown


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_test_that_passes_only_alone_fails_the_run_and_is_named(project: Path, capfd):
    code, shown = run(project, capfd, a=GOOD, b=FLAKY, c=BAD)
    assert code == 1
    lines = shown.splitlines()
    assert [line for line in lines if line.startswith("flaky: ")] == [
        "flaky: test_b.py::test_flaky: failed in a parallel run, passed alone"
    ]
    assert f"failed: {runner.PARALLEL}" in lines
    end = "\n".join(lines[lines.index("=== failures ===") :])
    assert "FAILED test_c::test_bad\n    E       AssertionError: the reason\n" in end
    assert "FAILED test_b::test_flaky\n" in end
    assert re.fullmatch(r"=== 2 failed, 1 passed in \d+s ===", last_line(shown))


@pytest.mark.parametrize("option", ["", runner.COMPLETE])
def test_only_the_complete_run_has_repeated_tests_and_a_soak(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], option: str
):
    complete = bool(option)
    begun: dict[str, list[str]] = {}

    class Begun:
        """A step that ends at once."""

        log, failed = None, False

        def __init__(self, name: str, command: list[str], **_options: object) -> None:
            self.name = name
            begun[name] = command

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def code(self) -> int:
            return 0

    monkeypatch.setattr(runner, "Step", Begun)
    # Runs in a new checkout only, and chooses no tests.
    monkeypatch.setattr(runner, "compile_tests", lambda *_: None)
    monkeypatch.delenv(runner.KEEP, raising=False)
    assert runner.main([option] if option else []) == 1, "no test was run"
    assert last_line(capfd.readouterr().out).startswith("=== no tests ran in ")
    assert ("soak" in begun) == complete
    assert "types" in begun
    assert (f"{runner.ELSEWHERE}: tests/environments/test_aarch64.py" in begun) == complete
    assert f"{runner.ELSEWHERE}: {ELSEWHERE}" in begun
    runs = [command for command in begun.values() if "pytest" in command]
    assert len(runs) >= 3
    for command in runs:
        marks = command[len(command) - command[::-1].index("-m")]
        assert marks.endswith(f" and not {tiers.REPEATED}") != complete
        assert runner.COMPLETE not in command


FAILED_INSIDE = """<testsuites><testsuite><testcase classname="tests.e" name="test_in[user]">
<failure message="AssertionError: user: exit code 1&#10;...">
name = 'user'
&gt;       assert done.returncode == 0, _summary(name, done)
E       AssertionError: user: exit code 1
E         ....F
E         FAILED tests/contract/test_a.py::test_x[userns] - assert 1 == 2
E         1 failed, 986 passed
more</failure></testcase>
<testcase classname="tests.e" name="test_good"/></testsuite></testsuites>"""


def test_the_failures_inside_a_repetition_are_named(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(FAILED_INSIDE)
    (found,) = runner.failures(report)
    assert found.startswith("FAILED tests.e::test_in[user]\n    E       AssertionError: user: exit")
    assert "FAILED tests/contract/test_a.py::test_x[userns] - assert 1 == 2" in found
    assert "986 passed" in found
    many = "".join(f"E  line {number}\n" for number in range(500))
    many += "E  FAILED tests/contract/test_b.py::test_y - why\n"
    report.write_text(FAILED_INSIDE.replace("more", many))
    (found,) = runner.failures(report)
    assert "test_y - why" in found
    assert len(found.splitlines()) <= 1 + 2 * runner.REASON_LINES
    assert runner.failures(tmp_path / "missing.xml") == []


def test_a_step_that_writes_no_report_is_explained_by_its_last_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    code = "for n in range(99): print('line', n)\nprint('wrong: x' * 999)\nraise SystemExit(3)"
    with (
        steps.Step("soak", [sys.executable, "-c", code], log=tmp_path / "soak.log") as bad,
        steps.Step("types", [sys.executable, "-c", "pass"], log=tmp_path / "types") as good,
    ):
        steps.wait([bad, good])
    capfd.readouterr()
    runner.explain([bad, good], {bad: tmp_path / "missing.xml"})
    shown = capfd.readouterr().out.strip().splitlines()
    assert shown[:2] == ["=== failures ===", "FAILED soak"]
    assert shown[-1].startswith("    wrong: x")
    assert len(shown) == 2 + runner.REASON_LINES
    assert max(map(len, shown)) <= 4 + runner.REASON_CHARACTERS


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_to_run_is_a_failure(project: Path, capfd):
    code, shown = run(project, capfd)
    assert code == 1
    assert last_line(shown).startswith("=== no tests ran in ")


def test_steps_report_their_ends_and_the_output_of_those_that_failed(tmp_path: Path, capfd):
    def step(name: str, code: str, **options: float) -> steps.Step:
        return steps.Step(name, [sys.executable, "-c", code], log=tmp_path / name, **options)

    with (
        step("good", "print('quiet')") as good,
        step("bad", "print('loud'); raise SystemExit(3)") as bad,
        step("stuck", SLOW, limit_s=1.0) as stuck,
    ):
        steps.wait([good, bad, stuck])
    assert [good.failed, bad.failed, stuck.failed] == [False, True, True]
    assert (good.code(), bad.code(), stuck.code()) == (0, 3, -9)
    shown = capfd.readouterr().out
    assert "quiet" not in shown
    assert "loud" in shown
    assert re.search(r"^--- good: done in \d+s, \d+s of processors ---$", shown, re.MULTILINE)
    assert re.search(
        r"^--- bad: FAILED, exit code 3, in \d+s, \d+s of processors ---$", shown, re.MULTILINE
    )


def test_a_step_ends_with_its_block(tmp_path: Path):
    with steps.Step("stuck", [sys.executable, "-c", SLOW], log=tmp_path / "log") as stuck:
        assert stuck.code() is None
    assert stuck.code() == -15


@pytest.mark.parametrize("broken", [[], ["types"], ["tests"]])
def test_check_fails_if_one_of_its_steps_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], broken: list[str]
):
    def command(name: str) -> list[str]:
        return ["-c", f"raise SystemExit({int(name in broken)})"]

    static = {name: [sys.executable, *command(name)] for name in check.STATIC}
    monkeypatch.setattr(check, "STATIC", static)
    monkeypatch.setattr(check, "TESTS", command("tests"))
    assert check.main([]) == len(broken)
    end = last_line(capfd.readouterr().out)
    assert re.fullmatch(r"--- check: (OK|FAILED: (\w+)) in \d+s ---", end)
    assert all(name in end for name in broken)


def test_modules_that_take_long_exist():
    assert {path for path in conftest.LONG if not (steps.ROOT / path).is_file()} == set()


GROUPED = """
import sys
sys.path.insert(0, {root!r})
from tests import conftest
conftest.LONG = ("test_long.py",)
pytest_xdist_make_scheduler = conftest.pytest_xdist_make_scheduler
"""
COUNTED = """
import os, pathlib, pytest, time

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    with pathlib.Path("order").open("a") as file:
        file.write(f"{{__name__}} {{os.getpid()}}\\n")
    # Until the other worker has begun too.
    end = time.monotonic() + 60
    while len(set(pathlib.Path("order").read_text().split("\\n"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_worker_runs_all_of_a_module_and_long_ones_begin_first(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(GROUPED.format(root=str(steps.ROOT)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, count in (("large", 9), ("long", 4), ("middle", 5)):
        (tmp_path / f"test_{name}.py").write_text(COUNTED.format(count=count))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    ran = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert len(ran) == 18
    workers = dict(map(tuple, ran))
    assert len({tuple(line) for line in ran}) == 3, "each module had one worker"
    assert workers["test_long"] != workers["test_large"], "the control: there are two"
    begun = list(dict.fromkeys(name for name, _ in ran))
    assert set(begun[:2]) == {"test_long", "test_large"}


@pytest.mark.parametrize("mark", ["alone", "elsewhere"])
def test_runs_of_marked_tests_collect_every_file_that_uses_the_mark(mark: str):
    found = runner.files_with(mark)
    assert {"alone": "tests/faults/test_soak.py"}.get(mark, ELSEWHERE) in found
    assert "tests/contract/test_basics.py" not in found
    # A mark that a helper module applies would not be found by the text of the test file.
    helpers = [path for path in (steps.ROOT / "tests").rglob("*.py") if "test_" not in path.name]
    assert [path for path in helpers if f"mark.{mark}" in path.read_text(encoding="utf-8")] == []


def test_other_environments_run_two_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(runner, "files_with", lambda _mark, **_options: ["a", "b", "c"])
    monkeypatch.setattr(runner, "RUNS", {runner.ELSEWHERE: []})
    begun: list[steps.Step] = []

    def step(name: str, _command: list[str], **_options: object) -> steps.Step:
        if len(begun) == runner.ELSEWHERE_AT_ONCE:
            assert [other.code() for other in begun].count(None) < runner.ELSEWHERE_AT_ONCE
        code = SLOW if begun else "pass"  # the first ends, so the third may begin
        begun.append(steps.Step(name, [sys.executable, "-c", code], log=tmp_path / f"{len(begun)}"))
        return begun[-1]

    monkeypatch.setattr(runner, "Step", step)
    with ExitStack() as stack:
        runs = list(runner.elsewhere(tmp_path, [], stack))
        assert [step.name for step, _ in runs] == [f"{runner.ELSEWHERE}: {n}" for n in "abc"]
        assert len({report for _, report in runs}) == 3
    capfd.readouterr()
