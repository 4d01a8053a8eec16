"""Each import contract of pyproject.toml fails for an import that it forbids."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {
    "layers": ("_backends/none.py", "from union.sandbox.server import main"),
    "pure": ("_plan/seatbelt.py", "import subprocess"),
    "native-fence": ("_net/dialer.py", "def planted():\n    from ctypes import util\n"),
    "flyte-fence": ("server/_auth.py", "import flyte"),
    "client": ("remote/_run.py", "from union.sandbox._linux import kernel"),
    "http-fence": ("_session/streams.py", "import aiohttp.web"),
    "framework-fence": ("adapters/langchain.py", "import smolagents"),
    "testing": ("testing/__init__.py", "from union.sandbox._net import dialer"),
}
"""By contract: a file of the package, and the import that is added to it."""


def contracts() -> dict[str, str]:
    """Return the names of the contracts by their ids."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {one["id"]: one["name"] for one in settings["tool"]["importlinter"]["contracts"]}


def lint(tree: Path) -> tuple[dict[str, str], str]:
    """Return KEPT or BROKEN by the name of the contract, and the whole output.

    Without the cache, which knows files by their times only.
    """
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("lint-imports is not installed: make setup")
    done = subprocess.run(
        [program, "--no-cache"],
        check=False,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    return found, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "bin", "*.so")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    return tmp_path


def test_each_contract_fails_for_a_planted_import(tree: Path) -> None:
    names = contracts()
    assert names.keys() == PLANTED.keys(), "each contract has an import that must break it"
    found, output = lint(tree)
    assert found == dict.fromkeys(names.values(), "KEPT"), output
    for path, text in PLANTED.values():
        with (tree / "src" / "union" / "sandbox" / path).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    found, output = lint(tree)
    assert found == dict.fromkeys(names.values(), "BROKEN"), output
    assert "union.sandbox._net.dialer -> ctypes" in output
