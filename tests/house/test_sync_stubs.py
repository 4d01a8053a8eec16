"""The type stubs of the synchronous face are those of today's asynchronous API."""

from __future__ import annotations

import ast
import inspect

import pytest
from scripts import sync_stubs

from union.sandbox import sync


@pytest.mark.spec("O1")
def test_the_stubs_are_fresh() -> None:
    stale = [
        path.name
        for path, text in sync_stubs.stubs().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: python -m scripts.sync_stubs"


@pytest.mark.spec("O1")
@pytest.mark.parametrize("name", ["Session", "SandboxProcess", "SandboxSession"])
def test_a_stub_has_the_members_that_exist(name: str) -> None:
    tree = ast.parse((sync_stubs.PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    written: set[str] = set()
    waiting = [name]
    while waiting:
        node = classes[waiting.pop()]
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        written |= {found.name for found in node.body if isinstance(found, ast.FunctionDef)}
        for found in node.body:
            if isinstance(found, ast.Assign):
                written.add(ast.unparse(found.targets[0]))
    there = {
        member
        for member, _ in inspect.getmembers(getattr(sync, name))
        if not member.startswith("_")
    }
    assert there <= written
    assert there


@pytest.mark.spec("O1")
def test_no_stub_is_asynchronous() -> None:
    for path in sync_stubs.stubs():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
