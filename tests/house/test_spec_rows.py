"""Every row of the specification has a test that names it, or is known not to be built yet."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "docs" / "SPEC.md"

# Remove a row from here when it is built: a listed row must have no test that names it.
NOT_YET: dict[str, str] = {
    "K5": "measured by the benchmark, and no test fails for a time",
    "N2": "measured by the benchmark, and no test fails for a time",
}


def rows_of(text: str) -> list[str]:
    """Return the ids in order: `A1` of a list, or the letter of a section that is one row."""
    found = []
    for section in re.split(r"^## (?=[A-Z]\. )", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(rf"^- ({section[0]}[0-9]+) ", section, flags=re.MULTILINE)
        found += rows or [section[0]]
    return found


def marked_in(source: str) -> set[str]:
    """Return the rows that the tests in `source` name; text that is not code does not count."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source)] if "mark.spec" in source else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and _is_mark(node.func):
            found.update(ast.literal_eval(argument) for argument in node.args)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.decorator_list  # a body marks nothing, and most of a file is bodies
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def _is_mark(called: ast.expr) -> bool:
    is_spec = isinstance(called, ast.Attribute) and called.attr == "spec"
    return is_spec and ast.unparse(called) == "pytest.mark.spec"


ROWS = rows_of(SPEC.read_text(encoding="utf-8"))


@functools.cache
def marked() -> frozenset[str]:
    """Return the rows that the tests of this project name."""
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset().union(*(marked_in(path.read_text(encoding="utf-8")) for path in files))


def test_rows_are_read_from_lists_and_from_sections_without_one():
    text = "# S\n## A. One\n- A1 x\n- A2 y: A9\n- note\n## B. Two\ntext\n## C. Three\n- C10 z\n"
    assert rows_of(text) == ["A1", "A2", "B", "C10"]


def test_marks_are_read_from_code_alone():
    source = '@pytest.mark.spec("A1", "B2")\ndef f(): ...\n# pytest.mark.spec("C3")\n"spec(D4)"\n'
    assert marked_in(source) == {"A1", "B2"}


def test_the_specification_is_whole():
    assert [row[0] for row in ROWS] == sorted(row[0] for row in ROWS)
    assert set("ABCDEFGHIJKLMNOPR") == {row[0] for row in ROWS}
    assert len(ROWS) == len(set(ROWS)) > 50


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test_or_is_known_not_to_be_built(row: str):
    assert (row in marked()) != (row in NOT_YET), NOT_YET.get(row, "no test names this row")


def test_tests_name_only_rows_that_exist():
    assert set(ROWS) >= marked()
    assert set(ROWS) >= set(NOT_YET)
