"""The commands that pages show as indented blocks are executed, in a scratch copy of the tree.

Nothing is downloaded: packages that pip needs are those of the environment of the tests. Commands
that cannot be executed here are listed with the reason. `test_commands.py` checks those, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripts.release import copy_of_tree
from tests.docs.test_commands import SHOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pages install on Linux")
LIMIT_S = 300.0
# The beginning of a line -> why it is not executed.
NOT_EXECUTED = {
    "make check": "runs this test",
    "make test": "runs this test",
    "make test-all": "runs this test",
    "make docs": "test_site.py builds the site; the generated pages have tests of their own",
    "pip install '.[ag2]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[anthropic]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[crewai]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[deepagents]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[google-adk]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[inspect-ai]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[langchain]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[mcp]'": "downloads an SDK; `make test-adapters` installs it so",
    "pip install '.[mini-swe-agent]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[openai-agents]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[pydantic-ai]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[smolagents]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[strands-agents]'": "downloads a framework; `make test-adapters` installs it so",
    "pip install '.[flyte]'": "differs from '.[remote]', which is executed, by a large SDK",
    "sbx mcp": "needs the SDK of MCP; `make test-adapters` starts it with clients",
    "SANDBOX_SERVER_TOKEN=... sandbox-server": "needs the SDK of MCP; `make test-adapters` has it",
    "sbx run --work-dir project --allow-pypi": "needs the public package index",
    "docker ": "needs a container engine and a registry",
    "sudo ": "changes the system",
    "openssl rand -hex 32 | sudo": "changes the system",
    "python3 -m venv ~/.local/sandbox": "its next line downloads an SDK",
}
INSTALL = "python3 -m venv .venv && . .venv/bin/activate"
# Executed in the virtualenv of the installation; their requirements are in that of the tests.
EXTRAS = ("pip install '.[remote]'",)
# Executed in a directory with these files: the page, the beginning of a line, files and variables.
PROGRAM = "import os\nprint(sorted(n for n in os.environ if n.endswith('KEY')))\n"
WITH_FILES: dict[tuple[str, str], tuple[dict[str, str], dict[str, str], str]] = {
    ("docs/guides/secrets.md", "sbx run --work-dir . --secret OPENAI_API_KEY@"): (
        {"agent.py": PROGRAM},
        {"OPENAI_API_KEY": "sk-proj-0123456789abcdef"},
        "['OPENAI_API_KEY']\n",
    ),
    ("docs/guides/secrets.md", "sbx run --work-dir . --secret 'KEY@api.example.com"): (
        {"client": f"#!/usr/bin/env python3\n{PROGRAM}"},
        {"KEY": "0123456789abcdef"},
        "['KEY']\n",
    ),
    ("docs/guides/docker.md", "python -m union.sandbox._seccomp.container_profile"): ({}, {}, ""),
}
SERVERS = ("sandbox-server --bind 0.0.0.0:8443",)


def plain(line: str) -> str:
    """Return a command without the remark after it."""
    return re.sub(r" {2,}(#.*)?$", "", re.sub(r" {2,}#.*", "", line)).strip()


def kind_of(page: str, line: str) -> str:
    """Return how a line is executed, or why it is not; empty if it is not listed."""
    if line in {INSTALL, "pip install .", "sbx doctor", "make demo", *EXTRAS}:
        return "installation"
    if any((page, start) for (of, start) in WITH_FILES if of == page and line.startswith(start)):
        return "with files"
    if line.startswith(SERVERS):
        return "server"
    return next((why for start, why in NOT_EXECUTED.items() if line.startswith(start)), "")


LINES = [(page, plain(line)) for page, lines in SHOWN.items() for line in lines]


@pytest.mark.spec("H")
def test_every_command_is_executed_or_listed_with_a_reason():
    assert [(page, line) for page, line in LINES if not kind_of(page, line)] == []
    lines = {line for _, line in LINES}
    unused = [start for start in NOT_EXECUTED if not any(s.startswith(start) for s in lines)]
    assert unused == [], "no page has these any more"
    for page, start in WITH_FILES:
        assert any(p == page and line.startswith(start) for p, line in LINES), start


def test_pages_install_with_the_same_commands():
    installing = {page: [line for p, line in LINES if p == page] for page, line in LINES
                  if line == INSTALL}  # fmt: skip
    assert set(installing) == {"README.md", "docs/index.md", "docs/tutorial.md"}
    for lines in installing.values():
        assert lines[:2] == [INSTALL, "pip install ."]


# A make of these tests is not one below the make that runs them.
NOT_KEPT = ("PIP_", "VIRTUAL_ENV", "MAKE", "MFLAGS")


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """Return variables with which pip finds its requirements without an index."""
    found = tmp_path / "packages"
    found.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_?unionai_sandbox|pip$|pip-|setuptools|__pycache__", entry.name):
            (found / entry.name).symlink_to(entry)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_KEPT)}
    own = Path(sys.executable).parent
    path = [p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != own]
    # Last, for `uv`: the others must be those of the new virtualenv.
    return {
        **kept,
        "PATH": os.pathsep.join([*path, str(own)]),
        "PYTHON": getattr(sys, "_base_executable", sys.executable),
        "PYTHONPATH": str(found),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # means: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def shell(text: str, where: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-ec", text],
        check=False,
        capture_output=True,
        text=True,
        cwd=where,
        env=env,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.spec("A1", "H")
def test_the_installation_and_the_demo_work_as_shown(offline: dict[str, str], tmp_path: Path):
    """One test, in one checkout: each step compiles, and pip starts slowly."""
    checkout = copy_of_tree(tmp_path / "checkout")
    shown = [line for page, line in LINES if page == "README.md"]
    text = "\n".join(shown[: shown.index("pip install .") + 1])
    bin_dir = Path(offline["PYTHON"]).parent
    shell(text, checkout, {**offline, "PATH": f"{bin_dir}:{offline['PATH']}"})
    printed = shell(". .venv/bin/activate\nsbx doctor || true", checkout, offline)
    assert f"{checkout}/.venv/lib" in re.sub(r"\s", "", printed)
    assert re.search(r"^(OK|NOT OK): default backend", printed, re.MULTILINE), printed

    # An extra; the launcher was compiled above.
    quick = {**offline, "UNION_SANDBOX_SKIP_NATIVE": "1"}
    shell("\n".join([". .venv/bin/activate", *EXTRAS]), checkout, quick)

    printed = shell("make demo", checkout, offline)
    assert printed.startswith("setup: checking Python and the C compiler\n")
    assert "the work dir is gone" in printed


@pytest.mark.parametrize("page, start", WITH_FILES)
def test_a_command_with_files_works_as_shown(page: str, start: str, tmp_path: Path):
    files, variables, expected = WITH_FILES[page, start]
    (line,) = (line for p, line in LINES if p == page and line.startswith(start))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **variables, "PATH": path}
    assert shell(line.replace("sbx run", "sbx run --backend userns"), tmp_path, env) == expected
    redirected = re.search(r"> (\S+)$", line)
    assert redirected is None or (tmp_path / redirected[1]).stat().st_size > 1000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the server of the remote page, on a port of the kernel's choice."""
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    (line,) = (line for _, line in LINES if line.startswith(SERVERS))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-ec", f"exec {line.replace('0.0.0.0:8443', '127.0.0.1:0')}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield process
        process.terminate()
    assert process.returncode == 0


def test_the_server_with_tls_prints_its_address_as_shown(served: subprocess.Popen[str]):
    assert served.stdout is not None
    assert re.search(r"https://\S+#sha256=[0-9a-f]{64}", served.stdout.readline())
