"""A bare install has no third-party package to import, so only the extras' packages may."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "union" / "sandbox"
MAY_USE_THIRD_PARTIES = {"adapters", "cluster", "remote", "server"}
EXTRAS = {"_net/authority.py": {"cryptography"}}
"""Single modules that import the package of an extra, at the first use of what needs it."""
OURS = {"union"}
FOR_TYPE_CHECKERS = {"_typeshed"}  # exists in no installation, so nothing can load it


def foreign_imports(source: str) -> set[str]:
    """Return the top-level names that ``source`` imports from outside stdlib and ``union``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - OURS - FOR_TYPE_CHECKERS


def test_the_detector_sees_every_form_of_import():
    source = "import os, a.b\nfrom c.d import e\ndef f():\n    import g\nfrom union import sandbox"
    assert foreign_imports(source) == {"a", "c", "g"}


@pytest.mark.spec("A2")
def test_core_imports_no_third_party():
    found = {
        path.relative_to(PACKAGE).as_posix(): foreign_imports(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY_USE_THIRD_PARTIES
    }
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == EXTRAS
