"""The reference has every public name, error code and variable, and is up to date."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING

import pytest
from scripts.reference import PAGES
from scripts.reference.codes import all_codes, anchor, classes, codes_in
from scripts.reference.docstrings import prose, signature
from tests.docs.blocks import ROOT

from union import sandbox as sb
from union.sandbox import on_device, remote, testing
from union.sandbox._linux.host import CA_VARIABLES

if TYPE_CHECKING:
    from pathlib import Path

SRC = ROOT / "src" / "union" / "sandbox"


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def headings(page: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_generated_page_is_up_to_date(page: str):
    is_same = (ROOT / page).read_text(encoding="utf-8") == PAGES[page]()
    assert is_same, f"{page} is out of date: run `make docs`"


# Names.

ALIASES = {
    name
    for name in sb.__all__
    if inspect.isclass(getattr(sb, name)) and getattr(sb, name).__name__ != name
}


@pytest.mark.parametrize("name", sorted(set(sb.__all__) - ALIASES))
def test_public_name_is_documented(name: str):
    if not inspect.ismodule(getattr(sb, name)):
        assert name in headings("reference/api.md") | headings("reference/errors.md")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_alias_is_documented(name: str):
    value = getattr(sb, name)
    assert inspect.ismodule(value) or f"- `{name}` is an alias of `{value.__name__}`." in text_of(
        "reference/api.md"
    )


@pytest.mark.parametrize("module", [on_device, remote, testing], ids=lambda m: m.__name__)
def test_names_of_public_modules_are_documented(module):
    short = module.__name__.rpartition(".")[2]
    assert {f"{short}.{name}" for name in module.__all__} <= headings("reference/api.md")


def members(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


@pytest.mark.parametrize("cls", [sb.Session, sb.SandboxProcess], ids=lambda c: c.__name__)
def test_every_member_is_documented_and_has_a_docstring(cls: type):
    documented = headings("reference/api.md")
    assert {f"{cls.__name__}.{name}" for name in members(cls)} <= documented
    callables = [
        n for n in members(cls) if callable(v := getattr(cls, n)) or isinstance(v, property)
    ]
    assert [name for name in callables if not (getattr(cls, name).__doc__ or "").strip()] == []


def test_docstrings_become_markdown():
    assert prose("A ``b``.\n\n>>> 1\n1\n\nC::\n\n::\n\n    x\n") == (
        "A `b`.\n\n```pycon\n>>> 1\n1\n```\n\nC::\n\n```text\nx\n```"
    )
    assert prose("A.\n\nArgs:\n    a: one\n        two ``c``.\n    b: three: four.\n\nB.") == (
        "A.\n\nArguments:\n\n- `a`: one two `c`.\n- `b`: three: four.\n\nB."
    )

    async def call(a: int, *, b: str = "x") -> bool: ...

    assert signature("call", call) == "```pyi\nasync call(a: int, *, b: str = 'x') -> bool\n```"


# Errors.


def test_codes_are_found_however_they_are_given():
    source = """
class AError(Exception):
    code = "a"
class BError(AError):
    code: str = "b"
def made(text, code="c"): ...
def lost(self):
    hint, code = "", "d"
    raise AError("x", code="e") from None
failed = Failed("spawn", "reason", "f", "a hint")
other = AError("x", code=f"g-{number}")
notes = Other(rcode="no", code=3)
"""
    assert codes_in(source) == {
        "a": {"AError"},
        "b": {"BError"},
        "c": {"SandboxExecutionError"},
        "d": {"SandboxConnectionError"},
        "e": {"AError"},
        "f": {"SandboxExecutionError"},
        "g-*": {"AError"},
    }


def entries() -> dict[str, str]:
    parts = re.split(r"^### (.+)$", text_of("guides/troubleshooting.md"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


CAUSE = re.compile(r"^\*\*Cause\.\*\* \S.{15,}", re.MULTILINE)
REMEDY = re.compile(r"^\*\*Remedy\.\*\* \S.{5,}", re.MULTILINE)


@pytest.mark.spec("D8")
def test_every_code_has_a_cause_and_a_remedy_and_no_other_entry_exists():
    written = {name.lower(): text for name, text in entries().items()}
    assert written.keys() == {anchor(code) for code in all_codes()}
    assert [code for code, text in written.items() if not CAUSE.search(text)] == []
    assert [code for code, text in written.items() if not REMEDY.search(text)] == []


def test_every_class_of_error_is_in_the_reference():
    documented = headings("reference/errors.md")
    assert {cls.__name__ for cls in classes()} <= documented
    defined = {
        node.name
        for path in SRC.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).startswith("Sandbox") for base in node.bases)
        and node.name.endswith("Error")
    }
    assert defined <= documented


# Variables.


def variables_in(path: Path) -> set[str]:
    """Return the environment variables that a file reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        looked_up: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.get"):
            looked_up = node.args[:1]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            looked_up = [node.slice]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target).endswith("_VARIABLE"):
            looked_up = [node.value] if node.value else []
        found |= {n.value for n in looked_up if isinstance(n, ast.Constant)}
    return {name for name in found if isinstance(name, str)}


def test_every_variable_is_in_the_reference():
    found = {name for path in SRC.rglob("*.py") for name in variables_in(path)}
    found |= variables_in(ROOT / "hatch_build.py") | set(CA_VARIABLES)
    assert {"SANDBOX_SERVER_TOKEN", "UNION_SANDBOX_CC", "SHELL"} <= found
    documented = set(re.findall(r"`([A-Z0-9_]+)`", text_of("reference/environment.md")))
    # HOME is only read inside a sandbox.
    assert found - documented - {"HOME"} == set()
