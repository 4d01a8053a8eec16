"""Source files have a maximum length, and a module is long enough to be worth a file."""

from __future__ import annotations

import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "union" / "sandbox"
MAX_LINES = 600
MAX_ORCHESTRATOR_LINES = 400
MIN_LINES = 30
MEDIAN_UNDER = 250

PYTHON = sorted((ROOT / "src").rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in {".c", ".h"})
TOOLS = sorted(p for name in ("tests", "scripts", "bench") for p in (ROOT / name).rglob("*.py"))

ORCHESTRATORS = [
    "_session/session.py",
    "_session/lifecycle.py",
    "_session/process.py",
    "_session/sink.py",
    "on_device/_transport.py",
    "on_device/_bring_up.py",
    "on_device/_pool.py",
    "on_device/_posture.py",
    "on_device/_runner.py",
    "_linux/run.py",
    "_linux/channel.py",
    "_linux/launcher.py",
    "_net/egress.py",
    "remote/_transport.py",
    "remote/_attached.py",
    "remote/_connection.py",
    "remote/_run.py",
    "server/_app.py",
    "server/_sessions.py",
    "server/_server_session.py",
    "server/_runs.py",
    "server/_connections.py",
    "server/_server_connection.py",
    "cluster/_launch.py",
    "cluster/_lifecycle.py",
    "cluster/_session.py",
    "cluster/_submit.py",
    "cluster/_supervisor.py",
    "cluster/_task.py",
    "_cli/main.py",
    "_cli/run.py",
]
"""The modules that connect the others: each grows with every feature unless it is split."""

SHORT_BY_RULE = {"__init__.py", "__main__.py", "_version.py"}
SHORT_FOR_A_REASON = {
    "_backends/none.py": "each backend has a file of its own",
    "_core/literals.py": "the public Literal types, which modules of every layer import",
    "_core/optional_deps.py": "loaded only where a package of an extra is needed",
    "_system.py": "the only module that asks for the operating system; all layers import it",
    "cluster/_resolver.py": "deployed environments contain the path of this module",
    "sync/on_device.py": "the module of that name without await, filled from the asynchronous one",
    "sync/remote.py": "the module of that name without await, filled from the asynchronous one",
}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long(paths: list[Path], limit: int) -> dict[str, int]:
    lengths = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in paths}
    return {path: length for path, length in lengths.items() if length > limit}


def too_short(paths: list[Path]) -> set[str]:
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in paths
        if path.name not in SHORT_BY_RULE and lines_of(path) < MIN_LINES
    }


def test_there_is_something_to_measure():
    assert PYTHON
    assert NATIVE
    assert TOOLS


def test_no_file_is_longer_than_the_cap():
    assert too_long([*PYTHON, *NATIVE, *TOOLS], MAX_LINES) == {}


def test_no_orchestrator_is_longer_than_its_cap():
    assert too_long([PACKAGE / name for name in ORCHESTRATORS], MAX_ORCHESTRATOR_LINES) == {}


def test_no_module_is_short_without_a_reason():
    assert too_short(PYTHON) == set(SHORT_FOR_A_REASON), (
        "merge a short module into the one that uses it, or add it with its reason; "
        "remove the entry of a module that is gone or has grown"
    )


def test_the_median_file_is_short():
    assert statistics.median(lines_of(path) for path in [*PYTHON, *NATIVE]) < MEDIAN_UNDER


def test_the_checks_find_what_is_too_long_or_too_short():
    assert too_long([Path(__file__)], lines_of(Path(__file__)) - 1)
    assert not too_long([Path(__file__)], lines_of(Path(__file__)))
    assert too_short([PACKAGE / "cluster" / "_resolver.py"]) == {"cluster/_resolver.py"}
    assert not too_short([PACKAGE / "__init__.py", PACKAGE / "_version.py", PACKAGE / "errors.py"])
