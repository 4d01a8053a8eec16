"""The table of Python versions is written by the tool that runs the tests."""

from __future__ import annotations

import re
import tomllib

from scripts import pythons


def test_a_result_replaces_that_of_the_same_version_and_tests():
    page = f"a\n{pythons.BEGIN}\n{pythons.HEAD[0]}\n{pythons.HEAD[1]}\n{pythons.END}\nb\n"
    for python, result in (("3.13.0", "1 failed"), ("3.11.7", "9 passed"), ("3.13.2", "8 passed")):
        page = pythons.recorded(page, python, "tests/unit", result, date="2026-01-02")
    page = pythons.recorded(page, "3.13.2", "tests/contract", "7 passed", date="2026-01-03")
    assert page.startswith("a\n")
    assert page.endswith("\nb\n")
    assert re.findall(r"^\| 3.*$", page, re.MULTILINE) == [
        "| 3.11.7 | `tests/unit` | 9 passed | 2026-01-02 |",
        "| 3.13.2 | `tests/contract` | 7 passed | 2026-01-03 |",
        "| 3.13.2 | `tests/unit` | 8 passed | 2026-01-02 |",
    ]


def test_counts_are_those_of_pytest():
    line = "1 failed, 2452 passed, 3 skipped in 134.89s (0:02:14)"
    assert pythons.counts(line) == "1 failed, 2,452 passed, 3 skipped"
    assert pythons.counts("could not be installed: x") == "no tests"


def test_the_page_lists_no_failure_and_only_supported_versions():
    text = pythons.PAGE.read_text(encoding="utf-8").partition(pythons.BEGIN)[2]
    rows = re.findall(r"^\| (3\.\d+)\.\S+ \|.*$", text.partition(pythons.END)[0], re.MULTILINE)
    assert set(rows) <= set(pythons.VERSIONS)
    assert "failed" not in text.partition(pythons.END)[0]
    project = tomllib.loads((pythons.ROOT / "pyproject.toml").read_text())["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if ":: 3." in c}
    assert named == set(pythons.VERSIONS)
