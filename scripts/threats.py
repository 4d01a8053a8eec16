"""Write docs/reference/threats.md: every row of the catalogue, with its tests."""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "threats.md"
sys.path.insert(0, str(ROOT))

from tests.confined import rows as confined  # noqa: E402 - the path comes first
from tests.escape.catalogue import NOT_APPLICABLE, ROWS  # noqa: E402 - the path comes first

HEAD = """\
# Attack catalogue

This page lists known ways to break a sandbox, with the tests that try them. Each test attacks from
inside, or from the network if the server is the target. Its positive control proves that a
successful attack is detected. `make test` ends with the number of rows that were blocked.

`python scripts/threats.py` generates this page from `tests/escape/catalogue.py` and the marks of
the tests.
"""


def _definitions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the functions and classes of a module, except those inside functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)


def _rows(marks: Iterable[ast.AST]) -> set[int]:
    """Return the rows of threat marks."""
    found: set[int] = set()
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.threat":
            found.update(ast.literal_eval(argument) for argument in mark.args)
    return found


def _of_module(tree: ast.Module) -> set[int]:
    """Return the rows in the `pytestmark` of a module."""
    values = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    return {row for value in values for row in _rows(ast.walk(value))}


def marked(source: str) -> dict[str, set[int]]:
    """Return the rows of each test in `source`."""
    found: dict[str, set[int]] = {}
    tree = ast.parse(source) if "mark.threat" in source else ast.Module([], [])
    of_module = _of_module(tree)
    for node in _definitions(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rows = _rows(node.decorator_list)
            if node.name.startswith("test_"):
                rows |= of_module
            if rows:
                found[node.name] = rows
    return found


def attacks() -> dict[int, dict[str, list[str]]]:
    """Return, for each row, the test files that attack it and their tests."""
    found: dict[int, dict[str, list[str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        for test, rows in marked(path.read_text(encoding="utf-8")).items():
            for row in rows:
                found.setdefault(row, {}).setdefault(name, []).append(test)
    return found


def page() -> str:
    """Return the whole page."""
    found = attacks()
    total = len({(file, test) for row in found.values() for file in row for test in row[file]})
    lines = [HEAD, f"{len(ROWS)} rows, {total} tests.", ""]
    for kind, rows in groupby(ROWS.values(), key=lambda row: row.kind):
        lines += [f"## {kind}", "", "| | attack | tests |", "|---|---|---|"]
        for row in rows:
            tests = NOT_APPLICABLE.get(row.number) or _links(found.get(row.number, {}))
            lines.append(f"| {row.number} | {row.title} | {tests} |")
        lines.append("")
    return "\n".join((*lines, confined.section()))


def _links(files: dict[str, list[str]]) -> str:
    return ", ".join(
        f"[{file.removeprefix('tests/').removesuffix('.py')}](../../{file}) ({len(tests)})"
        for file, tests in files.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
