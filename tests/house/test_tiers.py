"""What `make test` and `make check` leave out is there, and no row loses its last test by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import check
from tests import tiers
from tests.escape.catalogue import NOT_APPLICABLE, ROWS
from tests.tiers import NOT_IN_CHECK, ONLY_IN_TEST_ALL, Collected, Entry

pytestmark = pytest.mark.timeout(240)  # a collection of its own takes long beside other runs
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DIRECTORIES = tuple(sorted({path.parent.name for path in TESTS.glob("*/test_*.py")}))
COLLECT = """
import json, sys, pytest
from tests import tiers

class Listed:
    def pytest_collection_finish(self, session):
        tests = session.config.stash[tiers.ALL_TESTS]
        with open(sys.argv[1], "w") as output:
            json.dump([[t.name, [*t.values], [*t.rows]] for t in tests], output)

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[Listed()]))
"""


@pytest.fixture(scope="module")
def collected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Collected]:
    """All tests. A run of all files has collected them already, which takes ten seconds."""
    tests = request.config.stash[tiers.ALL_TESTS]
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    if {test.file for test in tests} == files and not request.config.getoption("--only-way"):
        return tests
    listed = tmp_path_factory.mktemp("collected") / "tests.json"
    command = [sys.executable, "-c", COLLECT, str(listed)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=220)
    return [
        Collected(name, frozenset(values), frozenset(rows))
        for name, values, rows in json.loads(listed.read_text())
    ]


def test_make_test_proves_every_row(collected: list[Collected]):
    rows = {row for test in collected for row in test.rows}
    assert rows >= {f"threat {row}" for row in ROWS if row not in NOT_APPLICABLE}
    assert len([row for row in rows if row.startswith("spec ")]) > 50
    assert tiers.unproven(ONLY_IN_TEST_ALL, collected) == set()


@pytest.mark.parametrize("row", ["spec O3", "threat 59"])
def test_a_row_without_a_test_is_noticed(collected: list[Collected], row: str):
    hidden = Entry("control", tuple({test.function for test in collected if row in test.rows}))
    assert row in tiers.unproven([*ONLY_IN_TEST_ALL, hidden], collected)
    everything = Entry("control", DIRECTORIES)
    assert tiers.unproven([everything], collected) == {r for test in collected for r in test.rows}


def test_every_entry_names_tests_that_exist(collected: list[Collected]):
    assert tiers.stale(ONLY_IN_TEST_ALL, collected) == set()
    assert tiers.stale(NOT_IN_CHECK, collected) == set()
    gone = ("house/test_gone.py", "contract[gone]", "house/test_tiers.py::test_gone")
    outside = Entry("control", ("house", *gone), but=("contract/test_basics.py", "house/gone"))
    assert tiers.stale([outside], collected) == {*gone, *outside.but}


def test_every_entry_has_a_reason():
    for entry in (*ONLY_IN_TEST_ALL, *NOT_IN_CHECK):
        assert len(entry.reason.split()) > 2
        assert entry.tests
        assert not (entry.but and entry.cases), f"one of them names what is kept: {entry.reason}"


A = Collected("x/test_y.py::test_z[a-b]", frozenset({"a-b", "a", "b"}), frozenset({"spec A1"}))
B = Collected("x/test_y.py::test_z[a-c]", frozenset({"a-c", "a", "c"}))
C = Collected("x/test_yy.py::test_z")


@pytest.mark.parametrize(
    "entry, gone",
    [
        (Entry("directory", ("x",)), [A, B, C]),
        (Entry("file", ("x/test_y.py",)), [A, B]),
        (Entry("function", ("x/test_yy.py::test_z",)), [C]),
        (Entry("complete id", ("x/test_y.py::test_z[a-c]",)), [B]),
        (Entry("value", ("x[a]",)), [A, B]),
        (Entry("all values", ("x[a, c]",)), [B]),
        (Entry("kept", ("x",), but=("x/test_y.py[c]",)), [A, C]),
        (Entry("cases", ("x",), cases=1), [B]),
        (Entry("part of a name", ("x/test_y", "x/test_y.py::test", "x[a-]")), []),
    ],
    ids=lambda value: value.reason if isinstance(value, Entry) else "",
)
def test_what_an_entry_leaves_out(entry: Entry, gone: list[Collected]):
    assert tiers.left_out([entry], [A, B, C]) == {test.name for test in gone}
    assert tiers.unproven([entry], [A, B, C]) == ({"spec A1"} if A in gone else set())


def test_cases_are_counted_among_the_tests_that_earlier_entries_leave():
    one = Entry("one case", ("x/test_y.py",), cases=1)
    assert tiers.left_out([one], [A, B]) == {B.name}
    assert tiers.left_out([Entry("the first", ("x[b]",)), one], [A, B]) == {A.name}


def test_make_check_does_not_collect_whole_files_that_it_leaves_out():
    whole = Entry("whole", ("x/test_y.py", "x", "x/test_y.py::test_z"))
    assert tiers.whole_files([whole]) == {"tests/x/test_y.py"}
    assert tiers.whole_files([Entry("part", ("x/test_y.py",), cases=1)]) == set()
    assert tiers.whole_files([Entry("part", ("x/test_y.py",), but=("x/test_y.py[a]",))]) == set()
    assert f"--ignore=tests/house/{Path(__file__).name}" in check.TESTS


SUITE = """
import pytest

@pytest.mark.parametrize("value", ["a", "b"])
def test_it(value): ...
"""
PLUGIN = """
import sys
sys.path.insert(0, {root!r})
from tests import tiers
tiers.ONLY_IN_TEST_ALL = (tiers.Entry("control", ("test_it.py[a]",)),)
tiers.NOT_IN_CHECK = (tiers.Entry("control", ("test_it.py[b]",)),)
def pytest_configure(config):
    config.pluginmanager.register(tiers.Marks())
"""


@pytest.mark.parametrize("mark, value", [(tiers.REPEATED, "a"), (tiers.HEAVY, "b")])
def test_listed_tests_get_their_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, value: str
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "conftest.py").write_text(PLUGIN.format(root=str(ROOT)))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    repeated: x\n    heavy: x\n")
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", mark]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if "::" in line] == [
        f"test_it.py::test_it[{value}]"
    ]
