"""The metadata of the package is right, and its namespace can be shared."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import union
import union.sandbox

ROOT = Path(__file__).resolve().parents[2]
NAME = "unionai-sandbox"


@pytest.mark.spec("A1")
def test_the_metadata_says_name_python_and_licence():
    found = metadata.metadata(NAME)
    assert found["Name"] == NAME
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.spec("A1")
def test_types_are_shipped():
    assert (Path(union.sandbox.__file__).parent / "py.typed").is_file()


@pytest.mark.spec("A1")
def test_another_distribution_can_share_the_namespace(tmp_path: Path):
    assert getattr(union, "__file__", None) is None
    (tmp_path / "union" / "other").mkdir(parents=True)
    (tmp_path / "union" / "other" / "__init__.py").write_text("word = 'here'\n")
    code = "import sys, union.sandbox, union.other; print(union.other.word)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}"},
    )
    assert (done.stdout, done.stderr) == ("here\n", "")


OF_ADAPTERS = {
    *("anthropic", "deepagents", "deepagents-code", "inspect-ai", "langchain", "mcp"),
    *("mini-swe-agent", "pydantic-ai", "smolagents", "strands-agents"),
}


@pytest.mark.spec("A2")
def test_extras_are_as_named_and_none_of_them_is_in_a_bare_install():
    found = metadata.metadata(NAME)
    extras = set(found.get_all("Provides-Extra") or [])
    assert extras == {"all", "deploy", "flyte", "remote", "secrets", *OF_ADAPTERS}
    bare = [need for need in metadata.requires(NAME) or [] if "extra ==" not in need]
    assert [need.partition(">")[0] for need in bare] == ["uv"]
