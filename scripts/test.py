"""Run every test: first all that can share the machine, then those that need it to themselves.

Beside the first, the suite is repeated as other users and in containers, and there is a soak, which
one of the second judges. The last lines sum up all runs: how many rows of the catalogue of threats
held, and all tests in pytest's words. Arguments are passed on to all; then there is no soak.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.escape.catalogue import NOT_APPLICABLE, ROWS  # noqa: E402 - the path comes first

# Most tests wait for a process or a clock. More workers than this were slower on two cores.
WORKERS = "4"
ELSEWHERE = "in other places"
BESIDE = "beside each other"
ALONE = "alone"
RUNS = {
    ELSEWHERE: ["-m", "elsewhere", "-p", "no:cacheprovider"],
    # What failed in earlier runs is forgotten: it is not what is run once more.
    BESIDE: [
        *("-m", "not alone and not elsewhere", "-n", WORKERS, "--dist", "loadgroup"),
        "--cache-clear",
    ],
    ALONE: ["-m", "alone"],
}
SOAK = ["--minutes", "3", "--most-minutes", "6", "--kills", "60", "--workers", "3"]
SOAK_LIMIT_S = 900.0
SUMMARY = "SOAK_SUMMARY"
"""Where tests/faults/test_soak.py finds what came of it."""
# What pytest returns when a test has failed.
SOME_FAILED = 1
# What pytest returns when its filter or its arguments leave nothing to run.
NOTHING_COLLECTED = 5


def counted(report: Path) -> Counter[str]:
    """Return how many tests passed, failed, and so on; nothing if pytest did not get that far."""
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
    """Which rows of the catalogue were attacked, and by tests that ended how."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._ends: dict[tuple[str, str], str] = {}

    def read(self, report: Path) -> None:
        """Add what a report tells; a test that is told of again was run again, and that counts."""
        if not report.exists():
            return
        fresh: dict[tuple[str, str], str] = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            key = (case.get("classname", ""), case.get("name", ""))
            rows = [p.get("value", "") for p in case.iter("property") if p.get("name") == "threats"]
            if rows:
                self._rows[key] = [int(row) for row in rows[0].split()]
            # A test that fails and then cannot be cleaned up stands there twice.
            if fresh.get(key) != "failed":
                fresh[key] = _end_of(case)
        self._ends.update(fresh)

    def told(self) -> str:
        """Return the line; nothing if no test of the catalogue was run."""
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


def _ranges(rows: list[int]) -> str:
    """Rows in few words: 1, 4-9."""
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


def again(found: Counter[str], report: Path) -> tuple[int, Counter[str]]:
    """Run once more, alone, what failed beside others: time limits are short and cores are few.

    What fails alone has failed. How many needed this is said, so that it cannot grow unseen.
    """
    wanting = found["failed"] + found["errors"]
    print(f"\n--- {wanting} once more, alone ---", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--last-failed",
        "--last-failed-no-failures=none",
        f"--junitxml={report}",
    ]
    done = subprocess.run(command, check=False, cwd=ROOT)
    if done.returncode == 0:
        print(f"{wanting} tests passed only when run alone", flush=True)
        found = Counter(passed=found["passed"] + wanting, skipped=found["skipped"])
    return done.returncode, found


class Run:
    """One run of pytest; with ``said``, beside others, and what it says is shown at its end."""

    def __init__(
        self,
        name: str,
        scratch: Path,
        arguments: list[str],
        *,
        said: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._said = said
        self.report = scratch / f"{name}.xml"
        options = [*RUNS[name], f"--junitxml={self.report}", *arguments]
        if said is None:
            self._tell()
        with said.open("wb") if said is not None else nullcontext() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", *options],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env=os.environ | (env or {}),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # does nothing to one that has ended
        self._process.wait()

    def _tell(self) -> None:
        print(f"\n--- tests {self._name} ---", flush=True)

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        code = self._process.wait()
        if self._said is not None:
            self._tell()
            print(self._said.read_text(errors="replace"), end="", flush=True)
        return code


class Soak:
    """`make soak`, beside the tests; it looks at nothing but what it has started itself."""

    def __init__(self, scratch: Path) -> None:
        self._summary = scratch / "soak.json"
        self._said = scratch / "soak.log"
        command = ["nice", "-n", "5", sys.executable, "-m", "scripts.soak", *SOAK]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*command, "--output", str(self._summary)], stdout=said, stderr=said, cwd=ROOT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # does nothing to one that has ended
        self._process.wait()

    def environment(self) -> dict[str, str]:
        """Wait for its end; what tells the test where to look."""
        begun = time.monotonic()
        try:
            code = self._process.wait(SOAK_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        waited = time.monotonic() - begun
        print(f"\n--- the soak: exit code {code}, waited for {waited:.0f}s ---", flush=True)
        if code != 0:
            # No summary, no excuse: the test that judges it fails.
            print(self._said.read_text(errors="replace")[-5000:], flush=True)
            self._summary.unlink(missing_ok=True)
        return {SUMMARY: str(self._summary)}


def main(arguments: list[str]) -> int:
    """Run all; return the first exit code that is not 0."""
    # Without what is kept compiled, each of thousands of Pythons compiles this project anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    total: Counter[str] = Counter()
    codes = []
    attacks = Attacks()
    begun = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sbx-reports-")))
        soak = None if arguments else stack.enter_context(Soak(scratch))
        elsewhere = stack.enter_context(Run(ELSEWHERE, scratch, arguments, said=scratch / "said"))
        beside = stack.enter_context(Run(BESIDE, scratch, arguments))
        code, found = beside.ended(), counted(beside.report)
        attacks.read(beside.report)
        codes.append(elsewhere.ended())
        if code == SOME_FAILED:
            report = scratch / "again.xml"
            code, found = again(found, report)
            attacks.read(report)
        codes.append(code)
        total += found
        env = {} if soak is None else soak.environment()
        alone = stack.enter_context(Run(ALONE, scratch, arguments, env=env))
        codes.append(alone.ended())
        for run in (elsewhere, alone):
            total += counted(run.report)
            attacks.read(run.report)
    if set(codes) <= {0, NOTHING_COLLECTED} and total["passed"]:
        code = 0
    else:
        code = next((code for code in codes if code), NOTHING_COLLECTED)
    words = [f"{total[word]} {word}" for word in ("failed", "passed", "skipped", "errors")]
    told = ", ".join(word for word in words if not word.startswith("0 ")) or "no tests ran"
    if attacks.told():
        print(f"\n{attacks.told()}", flush=True)
    print(f"\n=== {told} in {time.monotonic() - begun:.0f}s ===", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
