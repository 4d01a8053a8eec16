"""``import union.sandbox`` is cheap and loads no package of an extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
BUDGET = 25
OF_EXTRAS = {"aiohttp", "flyte", "google", "grpc", "kubernetes"}

# -I: neither the environment nor the current directory may help or hinder.
PROGRAM = """\
import json, sys
sys.path.insert(0, sys.argv[1])
import asyncio
before = set(sys.modules)
import union.sandbox
print(json.dumps([union.sandbox.__file__, sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[str, list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(SRC)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    where, added, everything = json.loads(done.stdout)
    return where, added, everything


def test_the_package_measured_is_the_one_in_this_tree(imported):
    where, _, _ = imported
    assert Path(where) == SRC / "union" / "sandbox" / "__init__.py"


@pytest.mark.spec("A5")
def test_import_costs_asyncio_and_a_few_modules(imported):
    _, added, _ = imported
    assert len(added) <= BUDGET, "\n".join(added)


@pytest.mark.spec("A2", "A5")
def test_import_loads_nothing_of_an_extra(imported):
    _, _, everything = imported
    assert {name.partition(".")[0] for name in everything} & OF_EXTRAS == set()
