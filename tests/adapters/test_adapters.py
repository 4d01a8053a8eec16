"""Adapters are independent, and each names the command that installs its framework."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib

import pytest
from scripts import adapters as judge_script
from tests.adapters.runner import BACKENDS, FRAMEWORKS, ROOT, IndexUnreachableError, judge

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ADAPTERS = sorted(
    path.stem
    for path in (ROOT / "src" / "union" / "sandbox" / "adapters").iterdir()
    if not path.name.startswith("_")
)
MISSING = """\
import importlib, importlib.abc, json, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"union"} | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
sys.path.insert(0, sys.argv[2])
try:
    importlib.import_module(f"union.sandbox.adapters.{sys.argv[1]}")
except ImportError as exc:
    print(json.dumps([type(exc).__name__, exc.code, exc.hint]))
else:
    print(json.dumps(["imported", "", ""]))
"""
NEEDS_NO_FRAMEWORK = {"e2b"}


@pytest.mark.spec("O2")
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_framework_is_an_error_with_the_install_command(name: str):
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MISSING, name, str(ROOT / "src")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    kind, code, hint = json.loads(done.stdout)
    if name in NEEDS_NO_FRAMEWORK:
        assert kind == "imported"
        return
    assert (kind, code) == ("MissingExtraError", "missing-extra")
    extra = re.match(r"in a checkout: pip install '\.\[([a-z0-9-]+)\]'", hint)
    assert extra is not None
    assert extra[1] in EXTRAS


def test_sbx_mcp_without_the_sdk_names_the_install_command():
    program = MISSING.partition("try:")[0]
    program += "from union.sandbox._cli.main import main\nsys.exit(main(['mcp']))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, "", str(ROOT / "src")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 125
    assert "pip install '.[mcp]'" in done.stderr


FRAMEWORKS_OF = {
    "ag2": {"ag2"},
    "anthropic": {"anthropic", "anyio"},
    "crewai": {"crewai", "pydantic"},
    "deepagents": {"deepagents", "deepagents_code"},
    "e2b": set(),
    "google_adk": {"google", "pydantic"},
    "inspect_ai": {"inspect_ai", "pydantic"},
    "langchain": {"langchain"},
    "mcp": {"anyio", "mcp", "mcp_types", "pydantic", "uvicorn"},
    "mini_swe_agent": {"minisweagent", "pydantic"},
    "openai_agents": {"agents"},
    "pydantic_ai": {"pydantic_ai"},
    "smolagents": {"PIL", "smolagents"},
    "strands": {"strands"},
}


@pytest.mark.spec("O2")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_imports_no_framework_but_its_own(name: str):
    home = ROOT / "src" / "union" / "sandbox" / "adapters"
    files = list((home / name).glob("*.py")) or [home / f"{name}.py"]
    files += home.glob("_*.py")  # shared by all adapters, so they import none
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    allowed = sys.stdlib_module_names | {"union", "aiohttp"}
    assert found - allowed <= FRAMEWORKS_OF[name]


def test_every_adapter_is_judged_and_has_a_page():
    assert {framework.module for framework in FRAMEWORKS.values()} == set(ADAPTERS)
    with_page = {framework.module for framework in FRAMEWORKS.values() if framework.page}
    assert with_page == set(ADAPTERS)
    index = (ROOT / "docs" / "adapters" / "index.md").read_text(encoding="utf-8")
    for framework in FRAMEWORKS.values():
        assert (framework.extra or framework.module) in EXTRAS or framework.module == "e2b"
        if framework.page:
            assert f"({framework.page})" in index
            page = (ROOT / "docs" / "adapters" / framework.page).read_text(encoding="utf-8")
            if framework.module != "e2b":  # it needs no package
                assert f"    pip install '.[{framework.extra or framework.module}]'\n" in page


def test_the_table_of_the_page_has_the_form_that_the_judge_writes():
    page = judge_script.PAGE.read_text(encoding="utf-8")
    shown = page.partition(judge_script.BEGIN)[2].partition(judge_script.END)[0]
    assert judge_script.table(judge_script.recorded(page)) == shown


def test_no_extra_of_an_adapter_is_in_all():
    (everything,) = EXTRAS["all"]
    included = set(everything.partition("[")[2].rstrip("]").split(","))
    assert {"remote", "flyte", "deploy"} <= included
    assert not included & {framework.extra or framework.module for framework in FRAMEWORKS.values()}


MCP = (
    "test_an_exit_code_is_a_result",
    "test_cancelling_a_call_ends_its_command",
    "test_files_and_commands_share_the_work_dir",
    "test_packages_need_the_network",
    "test_progress_arrives_before_the_end",
    "test_the_servers_limit_is_the_ceiling",
    "test_tools_run_in_sessions_of_the_server",
    "test_variables_persist_and_an_exception_is_a_result",
)


@pytest.mark.spec("O3")
@pytest.mark.timeout(600)
def test_clients_of_mcp_use_commands_cells_and_files():
    """One test of each kind of tool: the complete suite takes a minute longer."""
    try:
        outcome = judge("mcp", BACKENDS[0], only=MCP)
    except IndexUnreachableError as exc:
        pytest.skip(f"the packages of mcp cannot be fetched: {exc}")
    assert outcome.failures == {}, outcome.log[-3000:]
    assert outcome.counts == {"passed": len(MCP)}


@pytest.mark.spec("O2", "O3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [n for n, f in FRAMEWORKS.items() if f.is_quick])
def test_a_quick_suite_passes(name: str):
    try:
        outcome = judge(name, BACKENDS[0])
    except IndexUnreachableError as exc:
        pytest.skip(f"the packages of {name} cannot be fetched: {exc}")
    assert outcome.failures == {}, outcome.log[-3000:]
