"""Every argument of every public call is described, and errors lead to their remedy."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from scripts.reference.api import GROUPS, find
from scripts.reference.codes import all_codes, anchor
from scripts.reference.docstrings import split_fields
from tests.docs.blocks import ROOT

from union import sandbox as sb
from union.sandbox import sync

SKIPPED = {"self", "cls"}
INTERNAL = {"testing.ScriptedTransport"}
"""Sessions call its methods; a caller makes it and reads its attributes."""
OF_THE_ENGINE = {"apply", "needs_digest"}
"""Methods of credentials that the egress calls; a caller makes credentials only."""


def callables() -> dict[str, Any]:
    """Return every public function and method by the name in the reference."""
    found: dict[str, Any] = {}
    paths = {path for group in GROUPS.values() for path in group} | set(sb.__all__)
    for path in sorted(paths):
        value = find(path)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for name in dir(value):
                member = inspect.getattr_static(value, name)
                is_public = not name.startswith("_") and name not in OF_THE_ENGINE
                is_public = is_public and inspect.isfunction(member)
                if is_public and member.__module__.startswith("union.") and path not in INTERNAL:
                    found[f"{value.__name__}.{name}"] = member
        elif inspect.isfunction(value):
            found[path] = value
    return found


def described(docstring: str) -> set[str]:
    """Return the names in the section of arguments."""
    section = re.search(
        r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL
    )
    return (
        set(re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", section[1], re.MULTILINE))
        if section
        else set()
    )


CALLABLES = callables()


def test_calls_are_found():
    assert {"on_device.session", "Session.run", "SandboxProcess.wait", "doctor"} <= set(CALLABLES)


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_is_described(name: str):
    call = CALLABLES[name]
    wanted = {p for p in inspect.signature(call).parameters if p not in SKIPPED}
    assert wanted - described(call.__doc__ or "") == set()


@pytest.mark.parametrize("name", CALLABLES)
def test_no_argument_is_described_that_does_not_exist(name: str):
    call = CALLABLES[name]
    assert described(call.__doc__ or "") - set(inspect.signature(call).parameters) == set()


def test_every_field_of_a_class_is_described():
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", text, re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, description in rows if not description.strip()] == []


def test_descriptions_of_fields_are_found_in_a_docstring():
    rest, found = split_fields(
        "A thing.\n\n``a`` and ``b``: the first\ntwo.\n``c``: last.\n\nMore text.\n\n"
        "Attributes:\n    d: in a section,\n        continued.\n    e: another.\n"
    )
    assert rest.split() == ["A", "thing.", "More", "text."]
    assert found == {"a": "The first two.", "b": "The first two.", "c": "Last.",
                     "d": "In a section, continued.", "e": "Another."}  # fmt: skip


def test_fields_of_resources_are_in_the_guide_with_unit_default_and_enforcement():
    text = (ROOT / "docs/guides/limits.md").read_text(encoding="utf-8")
    rows = {
        match[1]: [cell.strip() for cell in match[0].strip("|\n").split("|")]
        for match in re.finditer(r"^\| `(\w+)` \|.*$", text, re.MULTILINE)
    }
    names = {field.name for field in dataclasses.fields(sb.Resources)}
    assert names <= set(rows)
    assert [name for name in names if len(rows[name]) != 6 or not all(rows[name])] == []


def test_the_synchronous_face_has_every_call():
    missing = [
        name
        for name in CALLABLES
        if name.startswith("Session.") and not hasattr(sync.Session, name.removeprefix("Session."))
    ]
    assert missing == []


def test_errors_in_the_reference_link_to_their_remedies():
    text = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(\.\./guides/troubleshooting\.md#([\w*-]+)\)", text))
    assert {anchor(code) for code in all_codes()} <= {name.lower() for name in linked}
