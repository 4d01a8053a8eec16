"""A handler of every exception re-raises or states its reason; so does a skipped test."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BROAD = {"Exception", "BaseException"}
REASON_OF = {"skip": ("reason", 0), "skipif": ("reason", None), "importorskip": ("reason", None)}
"""The keyword of each kind of skip, and the position that it may have instead."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_of(kind: ast.expr | None) -> set[str]:
    """Return the names in the ``except`` clause; a bare one catches ``BaseException``."""
    if kind is None:
        return {"BaseException"}
    parts = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def unexplained_handlers(source: str) -> Iterator[int]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and names_of(node.type) & BROAD:
            ends_with_raise = isinstance(node.body[-1], ast.Raise)
            returns = any(isinstance(part, ast.Return) for part in ast.walk(node))
            head = lines[node.lineno - 1 : node.body[0].lineno]
            if (not ends_with_raise or returns) and not any("#" in line for line in head):
                yield node.lineno


def suppressions(source: str) -> Iterator[int]:
    if "suppress" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "func", None)
        is_call = isinstance(node, ast.Call) and "suppress" in (
            getattr(name, "attr", ""),
            getattr(name, "id", ""),
        )
        if is_call and any(isinstance(arg, ast.Name) and arg.id in BROAD for arg in node.args):
            yield node.lineno


def unexplained_skips(source: str) -> Iterator[int]:
    if "skip" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in REASON_OF and ast.unparse(node.func).startswith("pytest."):
            keyword, position = REASON_OF[node.func.attr]
            given = [part.value for part in node.keywords if part.arg == keyword]
            if position is not None:
                given += node.args[position : position + 1]
            if not any(not isinstance(value, ast.Constant) or value.value for value in given):
                yield node.lineno


def bare_skip_marks(source: str) -> Iterator[int]:
    """Yield ``@pytest.mark.skip`` without a call, which has no reason."""
    if "mark.skip" not in source:
        return
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_skip = isinstance(node, ast.Attribute) and node.attr == "skip"
        if is_skip and id(node) not in called and ast.unparse(node) == "pytest.mark.skip":
            yield node.lineno


def found(check: object, *folders: str) -> list[str]:
    assert callable(check)
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files(*folders)
        for line in check(path.read_text(encoding="utf-8"))
    ]


def test_a_handler_of_every_exception_re_raises_or_states_its_reason():
    assert found(unexplained_handlers, "src") == []
    assert found(suppressions, "src") == []


def test_every_skip_states_its_reason():
    assert found(unexplained_skips, "tests") == []
    assert found(bare_skip_marks, "tests") == []


@pytest.mark.parametrize(
    "check, source, expected",
    [
        (unexplained_handlers, "try: ...\nexcept Exception:\n    pass\n", [2]),
        (unexplained_handlers, "try: ...\nexcept:\n    x()\n", [2]),
        (unexplained_handlers, "try: ...\nexcept (OSError, Exception):\n    x()\n", [2]),
        (unexplained_handlers, "try: ...\nexcept BaseException:\n    if x: raise\n", [2]),
        (unexplained_handlers, "try: ...\nexcept Exception:\n    x()\n    raise\n", []),
        (unexplained_handlers, "try: ...\nexcept Exception:  # a reason\n    x()\n", []),
        (unexplained_handlers, "try: ...\nexcept OSError:\n    pass\n", []),
        (suppressions, "with contextlib.suppress(Exception): ...\n", [1]),
        (suppressions, "with contextlib.suppress(OSError): ...\n", []),
        (unexplained_skips, "pytest.skip()\n", [1]),
        (unexplained_skips, "pytest.skip('')\n", [1]),
        (unexplained_skips, "pytest.mark.skipif(x)\n", [1]),
        (unexplained_skips, "pytest.importorskip('x')\n", [1]),
        (unexplained_skips, "pytest.mark.skipif(x, reason=NEEDS)\n", []),
        (unexplained_skips, "pytest.skip(f'needs {x}')\n", []),
        (bare_skip_marks, "@pytest.mark.skip\ndef f(): ...\n", [1]),
        (bare_skip_marks, "@pytest.mark.skip(reason='x')\ndef f(): ...\n", []),
    ],
)
def test_the_checks_find_what_lacks_a_reason(check, source, expected):
    assert list(check(source)) == expected
