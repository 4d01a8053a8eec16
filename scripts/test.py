"""`make test`, the gate: without the tests that tests/tiers.toml reserves for the complete run.

``--all`` is the complete run, `make test-all`: with those tests and a soak. Other arguments are
passed to pytest; then there are no static checks and no soak.

First come all tests that can share the machine. In parallel: style, layers and types; the soak,
whose result a later test checks; and repetitions of the suite as other users and in containers, one
file at a time, because all of them mostly wait. The rest of these follows, two files at a time.
Last come the tests that need the machine for themselves. A test that fails in a parallel run is
repeated alone, to distinguish a flaky test from a broken one: either fails the run, and is named.
The last lines summarise all runs: each failure with its reason, also those inside a repetition, how
many rows of the attack catalogue were blocked, and pytest's counts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.steps import NO_PLUGIN, POLL_S, STATIC, Step, wait  # noqa: E402 - the path comes first
from tests import tiers  # noqa: E402 - the path comes first
from tests.escape.catalogue import NOT_APPLICABLE, ROWS  # noqa: E402 - the path comes first

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Most tests wait for a process or a clock. Each worker collects all tests, which takes ten seconds
# of a core, and the repetitions in other environments have workers of their own.
WORKERS = "4"
ELSEWHERE = "tests in other environments"
PARALLEL = "tests in parallel"
ALONE = "tests alone"
AGAIN = "failed tests once more, alone"
MARKS = {ELSEWHERE: "elsewhere", PARALLEL: "not alone and not elsewhere", ALONE: "alone"}
RUNS = {
    ELSEWHERE: ["-p", "no:cacheprovider"],
    # Forget failures of earlier runs, so that they are not repeated.
    PARALLEL: ["-n", WORKERS, "--dist", "loadgroup", "--cache-clear"],
    ALONE: ["-p", "no:cacheprovider"],
    AGAIN: ["--last-failed", "--last-failed-no-failures=none"],
}
COMPLETE = "--all"
"""The option of the complete run."""
# Most of these repetitions have workers of their own.
ELSEWHERE_AT_ONCE = 2
LONG_ELSEWHERE = (
    "tests/environments/test_suite_elsewhere.py",
    "tests/environments/test_aarch64.py",
)
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
SOAK = ["--minutes", "0.5", "--most-minutes", "6", "--kills", "30", "--workers", "2"]
SOAK_LIMIT_S = 900.0
SUMMARY = "SOAK_SUMMARY"
"""The variable that names the summary of the soak to tests/faults/test_soak.py."""
KEEP = "REPORTS"
"""The variable that names a directory to keep reports and logs in, with the use of processors."""
REASON_LINES = 12
REASON_CHARACTERS = 400
MAX_FAILURES = 8
"""Failures with a reason at the end of the output; of more, the names."""
MAX_NAMES = 40
INNER = re.compile(r"(FAILED|ERROR|flaky:|wrong:|left:) ?\S")
# The exit code of pytest after a failed test.
SOME_FAILED = 1
# The exit code of pytest when no test was selected.
NOTHING_COLLECTED = 5


def counted(report: Path) -> Counter[str]:
    """Return the counts of passed and failed tests; empty if pytest printed none."""
    found: Counter[str] = Counter()
    if not report.exists():
        return found
    for suite in ET.parse(report).getroot().iter("testsuite"):
        number = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
        found["failed"] += number["failures"]
        found["errors"] += number["errors"]
        found["skipped"] += number["skipped"]
        found["passed"] += int(suite.get("tests", 0)) - sum(number.values())
    return found


class Attacks:
    """The attacked rows of the catalogue, with the outcomes of their tests."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._ends: dict[tuple[str, str], str] = {}

    def read(self, report: Path) -> None:
        """Add the results of a report. A test that failed once has failed."""
        if not report.exists():
            return
        for case in ET.parse(report).getroot().iter("testcase"):
            key = (case.get("classname", ""), case.get("name", ""))
            rows = [p.get("value", "") for p in case.iter("property") if p.get("name") == "threats"]
            if rows:
                self._rows[key] = [int(row) for row in rows[0].split()]
            # A test that fails and then fails in its teardown is listed twice.
            if self._ends.get(key) != "failed":
                self._ends[key] = _end_of(case)

    def summary(self) -> str:
        """Return the summary line; empty if no test of the catalogue was run."""
        ends: dict[int, set[str]] = {row: set() for row in ROWS if row not in NOT_APPLICABLE}
        for key, rows in self._rows.items():
            for row in rows:
                ends.setdefault(row, set()).add(self._ends[key])
        if not any(ends.values()):
            return ""
        held = [row for row, found in ends.items() if found == {"passed"}]
        line = f"threats: held {len(held)} of {len(ends)} ({len(NOT_APPLICABLE)} do not apply)"
        others = {
            "broken": [row for row, found in ends.items() if "failed" in found],
            "in part, as tests were skipped": [
                row for row, found in ends.items() if found == {"passed", "skipped"}
            ],
            "not tried": [row for row, found in ends.items() if found <= {"skipped"}],
        }
        for what, rows in others.items():
            if rows:
                line += f"; {what}: {_ranges(rows)}"
        return line


def failures(report: Path) -> list[str]:
    """Return the failed tests of a report, each with its reason in a few lines."""
    if not report.exists():
        return []
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):
        for end in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            found.append(f"FAILED {name}\n{_reason(end)}")
    return found


def _reason(end: ET.Element) -> str:
    """Return the lines of a failure that name its cause, the last ones if there are many."""
    text = [line.rstrip() for line in (end.text or "").splitlines() if line.strip()]
    # pytest marks the lines of an error with E. Those of a repeated suite name its own failures.
    marked = [line for line in text if line.startswith("E ")]
    inner = [line for line in text if INNER.match(line.removeprefix("E").strip())]
    chosen = list(dict.fromkeys((*marked[:REASON_LINES], *inner[:REASON_LINES])))
    chosen = chosen or (end.get("message", "") or "no reason").splitlines()[-REASON_LINES:]
    return "\n".join(f"    {line[:REASON_CHARACTERS]}" for line in chosen)


def tail(log: Path | None) -> list[str]:
    """Return the last lines of a step that is no pytest."""
    if log is None or not log.exists():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return [f"    {line[:REASON_CHARACTERS]}" for line in lines[-REASON_LINES:]]


def _ranges(rows: list[int]) -> str:
    """Return rows in short form: 1, 4-9."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else str(run)[1:-1] for run in runs)


def _end_of(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def files_with(mark: str, *, complete: bool = True) -> list[str]:
    """Return the test files that use a mark: collecting the others would only take time.

    Unless the run is ``complete``, the files that it leaves out are not among them.
    """
    found = (ROOT / "tests").rglob("test_*.py")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(found)}
    names = [str(path.relative_to(ROOT)) for path, text in texts.items() if f"mark.{mark}" in text]
    unwanted = set() if complete else tiers.whole_files(tiers.ONLY_IN_TEST_ALL)
    return [name for name in names if name not in unwanted]


def pytest_step(
    name: str,
    scratch: Path,
    arguments: list[str],
    *,
    part: str = "",
    to_log: bool = False,
    env: Mapping[str, str] | None = None,
    complete: bool = True,
) -> tuple[Step, Path]:
    """Start one run of pytest; return it and the path of its report. ``part`` is added to names."""
    base = f"{name} {part}".strip().replace("/", "-")
    report = scratch / f"{base}.xml"
    command = [sys.executable, "-m", "pytest", "-q", *NO_PLUGIN, *RUNS[name]]
    if marks := MARKS.get(name):
        command += ["-m", marks if complete else f"{marks} and not {tiers.REPEATED}"]
    command.append(f"--junitxml={report}")
    if os.environ.get(KEEP):
        command += ["-p", "tests.usage"]
    step = Step(
        f"{name}: {part}" if part else name,
        [*command, *arguments],
        log=scratch / f"{base}.log" if to_log else None,
        env={"REPORTS_RUN": base, **(env or {})},
        good=lambda code: code in {0, NOTHING_COLLECTED},
        verbose=True,
    )
    return step, report


def last_failed() -> set[str]:
    """Return the tests that failed in the last recorded run."""
    if not LAST_FAILED.exists():
        return set()
    return set(json.loads(LAST_FAILED.read_text(encoding="utf-8")))


def flaky(scratch: Path) -> list[str]:
    """Repeat the failed tests alone; return those that pass."""
    before = last_failed()
    if not before:
        return []  # For example, a worker crashed: there is nothing to repeat.
    step, _ = pytest_step(AGAIN, scratch, [])
    with step:
        wait([step])
    if step.code() not in {0, SOME_FAILED}:
        return []
    return sorted(before - last_failed())


def elsewhere(
    scratch: Path,
    arguments: list[str],
    stack: ExitStack,
    *,
    beside: Sequence[Step] = (),
    complete: bool = True,
) -> Iterator[tuple[Step, Path]]:
    """Repeat tests in other environments; yield each run when it has begun.

    As long as one of ``beside`` runs, there is one of them at a time.
    """
    running: list[Step] = []
    parts = files_with("elsewhere", complete=complete)
    for part in [""] if arguments else sorted(parts, key=_order):
        while True:
            is_shared = None in [step.code() for step in beside]
            at_once = 1 if is_shared else ELSEWHERE_AT_ONCE
            if sum(step.code() is None for step in running) < at_once:
                break
            time.sleep(POLL_S)
        chosen = arguments or [part]
        step, report = pytest_step(
            ELSEWHERE, scratch, chosen, part=part, to_log=True, complete=complete
        )
        running.append(stack.enter_context(step))
        yield step, report


def _order(path: str) -> tuple[int, str]:
    """Begin with those that take longest."""
    known = path in LONG_ELSEWHERE
    return LONG_ELSEWHERE.index(path) if known else len(LONG_ELSEWHERE), path


def soak(scratch: Path) -> tuple[Step, dict[str, str]]:
    """Start `make soak`; return it and the variable that names its summary to the test."""
    summary = scratch / "soak.json"
    command = ["nice", "-n", "5", sys.executable, "-m", "scripts.soak", *SOAK]
    log = scratch / "soak.log"
    step = Step("soak", [*command, "--output", str(summary)], log=log, limit_s=SOAK_LIMIT_S)
    return step, {SUMMARY: str(summary)}


def compile_tests(scratch: Path, steps: list[Step]) -> None:
    """Import all tests once in a new checkout; the workers would each rewrite all assertions."""
    if any((ROOT / "tests").glob("*/__pycache__/test_*-pytest-*.pyc")):
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *NO_PLUGIN]
    log = scratch / "compiled"
    with Step("compiling the tests", [*command, "-p", "no:cacheprovider"], log=log) as step:
        steps.append(step)
        wait([step])


def place_of_reports(stack: ExitStack) -> Path:
    """Return the directory for reports and logs: kept if the caller named one."""
    if named := os.environ.get(KEEP):
        place = Path(named).resolve()
        place.mkdir(parents=True, exist_ok=True)
        os.environ[KEEP] = str(place)
        return place
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sbx-reports-")))


def explain(steps: list[Step], reports: Mapping[Step, Path]) -> None:
    """Print what failed and why: a reader has only the end of the output."""
    found: list[str] = []
    for step in steps:
        if step.failed:
            named = failures(reports[step]) if step in reports else []
            found += named or ["\n".join((f"FAILED {step.name}", *tail(step.log)))]
    if found:
        print("\n=== failures ===", flush=True)
        print("\n".join(found[:MAX_FAILURES]), flush=True)
    if len(found) > MAX_FAILURES:
        names = [text.partition("\n")[0] for text in found[MAX_FAILURES:]]
        print("\n".join(names[:MAX_NAMES]), flush=True)


def main(arguments: list[str]) -> int:
    """Run the gate, or everything; return 0 on success, else 1."""
    complete = COMPLETE in arguments
    arguments = [argument for argument in arguments if argument != COMPLETE]
    # Without a bytecode cache, each of thousands of Pythons would compile this project again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.monotonic()
    attacks, total, unstable = Attacks(), Counter[str](), list[str]()
    steps: list[Step] = []
    reports: dict[Step, Path] = {}
    with ExitStack() as stack:
        scratch = place_of_reports(stack)
        env: dict[str, str] = {}
        if not arguments:
            for name, command in STATIC.items():
                steps.append(stack.enter_context(Step(name, command, log=scratch / name)))
            compile_tests(scratch, steps)
        if complete and not arguments:
            soaking, env = soak(scratch)
            steps.append(stack.enter_context(soaking))
        parallel, reports[parallel] = pytest_step(PARALLEL, scratch, arguments, complete=complete)
        steps.append(stack.enter_context(parallel))
        for step, reports[step] in elsewhere(
            scratch, arguments, stack, beside=list(steps), complete=complete
        ):
            steps.append(step)
        wait(steps)
        if parallel.code() == SOME_FAILED:
            unstable = flaky(scratch)
        chosen = arguments or files_with("alone", complete=complete)
        alone, reports[alone] = pytest_step(ALONE, scratch, chosen, env=env, complete=complete)
        steps.append(stack.enter_context(alone))
        wait(steps)
        for report in reports.values():
            total += counted(report)
            attacks.read(report)
        explain(steps, reports)
    for name in unstable:
        print(f"flaky: {name}: failed in a parallel run, passed alone", flush=True)
    bad = [step.name for step in steps if step.failed]
    if bad:
        print(f"failed: {', '.join(bad)}", flush=True)
    if attacks.summary():
        print(f"\n{attacks.summary()}", flush=True)
    counts = ", ".join(
        f"{total[word]} {word}" for word in ("failed", "passed", "skipped", "errors") if total[word]
    )
    taken = time.monotonic() - begun
    print(f"\n=== {counts or 'no tests ran'} in {taken:.0f}s ===", flush=True)
    return 1 if bad or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
