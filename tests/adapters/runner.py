"""Judge the adapters by their frameworks' own tests, each in an environment of its own.

An environment is made once, below ``.cache/adapters``, from the pinned versions of ``FRAMEWORKS``;
``LATEST=1`` makes another with the newest versions. The product in it is this checkout. A suite is
a file of ``tests/adapters/suites``: the framework's conformance tests, and our own. The programs of
the adapter's page are run as well.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.pythons import interpreters  # noqa: E402 - the path comes first
from tests.docs.blocks import blocks_in  # noqa: E402 - the path comes first

SUITES = ROOT / "tests" / "adapters" / "suites"
CACHE = ROOT / ".cache" / "adapters"
TOOLS = (
    *("pytest==9.1.1", "pytest-asyncio==1.4.0", "pytest-timeout==2.4.0", "uv"),
    *("aiohttp>=3.12", "cryptography>=42"),  # for sessions on a server
)
BACKENDS = tuple(os.environ.get("BACKENDS", "userns bubblewrap").split())
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework: its packages, and what of it is judged."""

    title: str
    module: str
    """The module of the adapter, below ``union.sandbox.adapters``."""
    classes: str
    """The names that its users import."""
    needs: tuple[str, ...]
    """Requirements, pinned."""
    suite: str
    """A file of ``suites``."""
    what: str
    """Whose tests they are."""
    page: str = ""
    """The page with its example, below ``docs/adapters``."""
    extra: str = ""
    """The extra that installs it; that of the module by default."""
    source: str = ""
    """The distribution whose source contains the tests."""
    files: tuple[str, ...] = ()
    """Files of ``source`` to run, with the suite as a plugin."""
    own: tuple[str, ...] = ()
    """Further files of ``suites`` with own tests."""
    npm: tuple[str, ...] = ()
    """Packages of npm that the suite runs, pinned."""
    shares: str = ""
    """The framework whose environment is used; its own by default."""
    needs_conftest: bool = False
    """Whether ``files`` use fixtures of the source's conftest.py."""
    mode: str = "auto"
    """The mode of pytest-asyncio."""
    known: dict[str, str] = field(default_factory=dict)
    """Ends of names of tests that fail for every backend, with the reason."""
    at_least: int = 1
    """Tests that must pass."""
    python: str = ""
    """The Python that it needs; that of the tests by default."""
    is_quick: bool = False
    """Whether ``make test-all`` runs it."""


_GLOB_TESTS = (
    *("test_glob", "test_glob_basic_pattern", "test_glob_with_directories"),
    *("test_glob_hidden_files_explicitly", "test_glob_with_character_class"),
    "test_glob_with_question_mark",
)
_GLOB = "deepagents 0.7 returns absolute paths, langchain-tests 1.1.9 expects relative ones"
_WRITE = "deepagents 0.7 overwrites, langchain-tests 1.1.9 expects a refusal"

_OPENAI_FILES = (
    *("test_unix_local", "test_unix_local_file_io", "test_unix_local_create", "test_extract"),
    *("test_run_cwd", "test_session_manager", "test_exposed_ports", "test_posix_tool_paths"),
    *("test_recursive_removal_compatibility", "capabilities/test_filesystem_capability"),
    "test_runtime",
)

FRAMEWORKS: dict[str, Framework] = {
    "mcp": Framework(
        title="MCP clients",
        module="mcp",
        classes="sbx mcp",
        needs=("mcp==2.3.0",),
        suite="mcp_tools.py",
        what="own tests through the SDK's client, SDK 2.x; of sandbox-server --mcp",
        page="mcp.md",
        own=("mcp_gateway.py", "hostile_tree.py"),
        at_least=20,
        is_quick=True,
    ),
    "mcp1": Framework(
        title="MCP clients",
        module="mcp",
        classes="sbx mcp",
        needs=("mcp==1.30.0",),
        suite="mcp_tools.py",
        what="the same, SDK 1.x",
        own=("mcp_gateway.py",),
        at_least=20,
    ),
    "mcp-protocol": Framework(
        title="MCP clients",
        module="mcp",
        classes="sbx mcp",
        needs=("mcp==2.3.0",),
        suite="mcp_protocol.py",
        what="the MCP project's Inspector and its conformance scenarios that apply",
        npm=(
            *("node@22", "@modelcontextprotocol/conformance@0.1.16"),
            "@modelcontextprotocol/inspector@2.12.0",
        ),
        shares="mcp",
        at_least=15,
    ),
    "pydantic-ai": Framework(
        title="Pydantic AI",
        module="pydantic_ai",
        classes="UnionSandbox, UnionSandboxBackend",
        needs=("pydantic-ai-slim==2.66.0", "anyio"),
        suite="pydantic_workspace.py",
        what="Pydantic AI's WorkspaceBackendSuite, and own tests",
        page="pydantic-ai.md",
        extra="pydantic-ai",
        own=("over_server.py", "hostile_tree.py"),
        at_least=38,
    ),
    "deepagents": Framework(
        title="deepagents",
        module="deepagents",
        classes="UnionSandbox, UnionSandboxProvider",
        needs=("deepagents==0.7.32", "langchain-tests==1.1.9"),
        suite="deepagents_backend.py",
        what="LangChain's SandboxIntegrationTests, below /tmp and below the work dir; own tests",
        page="deepagents.md",
        known={f"::{name}": _GLOB for name in _GLOB_TESTS}
        | {"::test_write_existing_file_fails": _WRITE},
        own=("over_server.py", "hostile_tree.py"),
        at_least=160,
    ),
    "deepagents-code": Framework(
        title="Deep Agents Code",
        module="deepagents",
        classes="UnionSandboxProvider",
        needs=("deepagents-code==0.1.88",),
        suite="dcode_provider.py",
        what="own tests of the provider, found by its entry point",
        extra="deepagents-code",
        python="3.12",
        at_least=3,
    ),
    "openai-agents": Framework(
        title="OpenAI Agents SDK",
        module="openai_agents",
        classes="UnionSandboxClient",
        needs=("openai-agents==0.24.0", "inline-snapshot", "pytest-mock", "docker"),
        suite="openai_swap.py",
        what="the SDK's tests of its local sandbox client, those that use ours; own tests",
        page="openai-agents.md",
        extra="openai-agents",
        source="openai-agents",
        files=tuple(f"tests/sandbox/{name}.py" for name in _OPENAI_FILES),
        own=("openai_client.py",),
        needs_conftest=True,
        mode="strict",
        at_least=100,
    ),
    "langchain": Framework(
        title="LangChain shell",
        module="langchain",
        classes="UnionExecutionPolicy",
        needs=("langchain==1.4.0",),
        suite="langchain_policy.py",
        what="own tests of the shell of ShellToolMiddleware",
        page="langchain.md",
        at_least=5,
    ),
    "inspect-ai": Framework(
        title="Inspect",
        module="inspect_ai",
        classes='sandbox="union"',
        needs=("inspect-ai==0.3.285",),
        suite="inspect_environment.py",
        what="Inspect's self_check, its injected tools, own tests",
        page="inspect.md",
        extra="inspect-ai",
        known={"::test_exec_as_user": "requests root and adduser; Inspect's local provider fails"},
        own=("over_server.py", "hostile_tree.py"),
        at_least=43,
    ),
    "smolagents": Framework(
        title="smolagents",
        module="smolagents",
        classes="UnionExecutor",
        needs=("smolagents==1.26.0", "docker", "numpy", "pillow", "ipython"),
        suite="smolagents_executor.py",
        what="smolagents' tests of its Docker executor, own tests",
        page="smolagents.md",
        source="smolagents",
        own=("over_server.py",),
        at_least=13,
    ),
    "anthropic": Framework(
        title="Anthropic SDK",
        module="anthropic",
        classes="agent_toolset, UnionBashSession",
        needs=("anthropic==2.8.0", "inline-snapshot", "respx", "dirty-equals"),
        suite="anthropic_toolset.py",
        what="the SDK's tests of agent_toolset_20260401",
        page="anthropic.md",
        source="anthropic",
        files=("tests/lib/tools/test_agent_toolset.py",),
        known={
            "::test_write_under_symlink_loop_creates_nothing": "it lists the venv",
            "::test_glob_drops_matches_that_cannot_be_canonicalised": "it lists the venv",
        },
        own=("over_server.py", "hostile_tree.py"),
        at_least=80,
    ),
    "strands-agents": Framework(
        title="Strands Agents",
        module="strands",
        classes="UnionSandbox",
        needs=("strands-agents==1.62.0",),
        suite="strands_sandbox.py",
        what="Strands' tests of its host environment",
        page="strands.md",
        extra="strands-agents",
        source="strands-agents",
        files=("tests/strands/sandbox/test_not_a_sandbox_local_environment.py",),
        known={"::test_relative_path_resolves_against_cwd": "the directory of the host process"},
        own=("over_server.py", "hostile_tree.py"),
        at_least=18,
    ),
    "mini-swe-agent": Framework(
        title="mini-swe-agent",
        module="mini_swe_agent",
        classes="UnionEnvironment",
        needs=("mini-swe-agent==2.4.6",),
        suite="mini_swe_environment.py",
        what="own tests of its environment protocol",
        page="mini-swe-agent.md",
        extra="mini-swe-agent",
        own=("over_server.py",),
        at_least=7,
    ),
    "ag2": Framework(
        title="AG2",
        module="ag2",
        classes="UnionEnvironment, UnionSandbox",
        needs=("ag2==1.2.1",),
        suite="ag2_environment.py",
        what="own tests of its sandbox protocol and its tools",
        page="ag2.md",
        at_least=7,
    ),
    "google-adk": Framework(
        title="Google ADK",
        module="google_adk",
        classes="UnionEnvironment, UnionCodeExecutor",
        needs=("google-adk==2.13.0",),
        suite="google_adk_environment.py",
        what="own tests of its environment and code executor interfaces",
        page="google-adk.md",
        extra="google-adk",
        own=("hostile_tree.py",),
        at_least=7,
    ),
    "crewai": Framework(
        title="CrewAI",
        module="crewai",
        classes="sandbox_tools, UnionExecTool, UnionPythonTool, UnionFileTool",
        needs=("crewai==1.15.30",),
        suite="crewai_tools.py",
        what="own tests of the tools",
        page="crewai.md",
        own=("hostile_tree.py",),
        at_least=6,
    ),
    "e2b": Framework(
        title="Code written for E2B",
        module="e2b",
        classes="Sandbox, AsyncSandbox",
        needs=("e2b-code-interpreter==2.11.5",),
        suite="e2b_shape.py",
        what="own tests; names and arguments compared with the SDK",
        page="e2b.md",
        own=("over_server.py", "hostile_tree.py"),
        at_least=17,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The counts of one suite, and its failures with their messages."""

    counts: Counter[str]
    failures: dict[str, str]
    log: str


# Environments.


def environment(name: str) -> Path:
    """Return the interpreter of the environment of a framework; make it if there is none."""
    latest = os.environ.get("LATEST") == "1"
    needs = [*TOOLS, *FRAMEWORKS[name].needs]
    if latest:
        needs = [need.partition("==")[0] for need in needs]
    where = CACHE / (f"{name}-latest" if latest else name)
    python = where / "bin" / "python"
    stamp = where / "needs.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{where.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or json.loads(stamp.read_text()) != needs:
            wanted = FRAMEWORKS[name].python
            wanted = interpreters().get(wanted, wanted) if wanted else sys.executable
            _uv("venv", "--quiet", "--clear", "--python", wanted, str(where))
            _uv("pip", "install", "--quiet", "--python", str(python), *needs)
            stamp.write_text(json.dumps(needs))
        _install_checkout(python)
    return python


class IndexUnreachableError(Exception):
    """The packages of a framework could not be fetched."""


def _uv(*argv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise IndexUnreachableError(done.stderr.strip()[-500:])


def _node_packages(needs: tuple[str, ...]) -> Path:
    """Return a directory with packages of npm; install them if they are not there."""
    where = CACHE / "npm"
    if os.environ.get("LATEST") == "1":
        where = CACHE / "npm-latest"
        needs = tuple(n if n.startswith("node@") else n.rpartition("@")[0] for n in needs)
    stamp = where / "needs.json"
    where.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{where.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or json.loads(stamp.read_text()) != list(needs):
            try:
                subprocess.run(
                    ["npm", "install", "--silent", *needs],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                    cwd=where,
                )
            except FileNotFoundError:
                raise IndexUnreachableError("npm is not installed") from None
            except subprocess.CalledProcessError as exc:
                raise IndexUnreachableError(exc.stderr.strip()[-500:]) from exc
            stamp.write_text(json.dumps(needs))
    return where


def _install_checkout(python: Path) -> None:
    """Make this checkout importable, with the entry points that pyproject.toml declares."""
    site = next((python.parent.parent / "lib").glob("python3*")) / "site-packages"
    (site / "checkout.pth").write_text(f"{ROOT / 'src'}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / "unionai_sandbox-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unionai-sandbox\nVersion: 0\n")
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def _source(python: Path, distribution: str) -> Path:
    """Return the unpacked source distribution of what an environment has."""
    show = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    version = subprocess.run(
        [python, "-c", show, distribution], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    home = CACHE / "sources"
    home.mkdir(exist_ok=True)
    where = home / f"{distribution.replace('-', '_')}-{version}"
    with (CACHE / f"{where.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.exists():
            with tempfile.TemporaryDirectory(dir=home) as fresh:
                done = subprocess.run(
                    [
                        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                        *("--no-binary", distribution, "-d", fresh),
                        f"{distribution}=={version}",
                    ],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
                archives = list(Path(fresh).glob("*.tar.gz"))
                if not archives:
                    raise IndexUnreachableError(done.stderr.strip()[-500:])
                subprocess.run(["tar", "-xzf", archives[0], "-C", home], check=True, timeout=120)
    return where


# Judging.


def judge(name: str, backend: str, *, only: tuple[str, ...] = ()) -> Outcome:
    """Run the suite of a framework on one backend, and the programs of its page.

    ``only`` names some tests of the suite, which are run alone, and all must pass.
    """
    framework = FRAMEWORKS[name]
    if only:
        framework = replace(framework, at_least=len(only), page="")
    python = environment(framework.shares or name)
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        outcome = _run_suite(framework, python, backend, Path(scratch), only)
        if framework.page:
            _run_page(framework, python, Path(scratch), outcome)
    return outcome


def _run_suite(
    framework: Framework, python: Path, backend: str, scratch: Path, only: tuple[str, ...]
) -> Outcome:
    report = scratch / "report.xml"
    suite = SUITES / framework.suite
    tests: list[str] = [str(suite)]
    where = scratch
    paths = [str(SUITES)]
    if framework.source:
        where = _source(python, framework.source)
        paths.append(str(where))
        if framework.files:
            tests = ["-p", suite.stem, *framework.files]
            if not framework.needs_conftest:
                tests.append("--noconftest")
    tests += [str(SUITES / name) for name in framework.own]
    if only:
        tests += ["-k", " or ".join(only)]
    done = subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
            *("--rootdir", str(where), "--confcutdir", str(SUITES), "--timeout", "150"),
            *("--junitxml", str(report)),
            *("-o", f"asyncio_mode={framework.mode}", "-o", "python_files=*.py", "--tb=short"),
            *("--basetemp", str(scratch / "t"), *tests),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=where,
        env={
            **os.environ,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "ADAPTER_BACKEND": backend,
            "ADAPTER_MODULE": framework.module,
            "MSWEA_SILENT_STARTUP": "1",
            "ADAPTER_SCRATCH": str(scratch),
            "ADAPTER_NPM": str(_node_packages(framework.npm)) if framework.npm else "",
        },
    )
    return _counted(framework, report, done.stdout + done.stderr)


def _counted(framework: Framework, report: Path, log: str) -> Outcome:
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    if not report.exists():
        return Outcome(counts, {"pytest": log[-3000:]}, log)
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            is_known = any(name.endswith(end) for end in framework.known)
            counts["known" if is_known else "failed"] += 1
            if not is_known:
                failures[name] = (bad.get("message") or "")[:300]
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    if counts["passed"] < framework.at_least:
        failures["count"] = f"{counts['passed']} tests passed, {framework.at_least} are expected"
    return Outcome(counts, failures, log)


def _run_page(framework: Framework, python: Path, scratch: Path, outcome: Outcome) -> None:
    """Run the programs of a page; each must print what the page shows."""
    page = ROOT / "docs" / "adapters" / framework.page
    for block in blocks_in(page.read_text(encoding="utf-8"), page=framework.page):
        program = scratch / f"line{block.line}.py"
        program.write_text(block.source, encoding="utf-8")
        done = subprocess.run(
            [str(python), "-W", "ignore", str(program)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=scratch,
            env={
                **os.environ,
                "MSWEA_SILENT_STARTUP": "1",
                "PATH": f"{python.parent}:{os.environ['PATH']}",
            },
        )
        where = f"{framework.page}:{block.line}"
        if done.returncode or (block.output is not None and done.stdout != block.output):
            outcome.counts["failed"] += 1
            outcome.failures[where] = f"{done.stdout[-500:]}\n{done.stderr[-1500:]}"
        else:
            outcome.counts["programs"] += 1
