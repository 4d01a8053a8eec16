"""Run every test: first all that can share the machine, then those that need it to themselves.

The last line sums up both runs, in pytest's words. Arguments are passed on to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
# Most tests wait for a process or a clock. More workers than this were slower on two cores.
WORKERS = "4"
ALONE = "alone"
RUNS = {
    "beside each other": ["-m", "not alone", "-n", WORKERS, "--dist", "loadgroup"],
    ALONE: ["-m", "alone"],
}
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


def again(found: Counter[str]) -> tuple[int, Counter[str]]:
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
    ]
    done = subprocess.run(command, check=False, cwd=ROOT)
    if done.returncode == 0:
        print(f"{wanting} tests passed only when run alone", flush=True)
        found = Counter(passed=found["passed"] + wanting, skipped=found["skipped"])
    return done.returncode, found


def main(arguments: list[str]) -> int:
    """Run both; return the first exit code that is not 0."""
    total: Counter[str] = Counter()
    codes = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sbx-reports-") as scratch:
        for number, (name, options) in enumerate(RUNS.items()):
            print(f"\n--- tests {name} ---", flush=True)
            report = Path(scratch, f"{number}.xml")
            command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}"]
            done = subprocess.run([*command, *arguments], check=False, cwd=ROOT)
            found = counted(report)
            code = done.returncode
            if code == SOME_FAILED and name != ALONE:
                code, found = again(found)
            codes.append(code)
            total += found
    if set(codes) <= {0, NOTHING_COLLECTED} and total["passed"]:
        code = 0
    else:
        code = next((code for code in codes if code), NOTHING_COLLECTED)
    words = [f"{total[word]} {word}" for word in ("failed", "passed", "skipped", "errors")]
    told = ", ".join(word for word in words if not word.startswith("0 ")) or "no tests ran"
    print(f"\n=== {told} in {time.monotonic() - begun:.0f}s ===", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
