"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SRC / "union" / "sandbox").rglob("*.py"))
    if "\n>>> " in (text := path.read_text(encoding="utf-8")) or "\n    >>> " in text
]


def test_there_are_examples():
    assert {"union.sandbox", "union.sandbox.on_device", "union.sandbox.testing"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, capsys: pytest.CaptureFixture[str]):
    done = doctest.testmod(importlib.import_module(name))
    assert done.failed == 0, capsys.readouterr().out
    assert done.attempted > 0
