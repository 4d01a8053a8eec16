"""Rank what a run has spent: ``REPORTS=reports make test-all``, then this on ``reports``.

Prints the runs of pytest in their order, and the directories, files and tests with the most seconds
of processors, and of the clock. On two cores the former decide how long a run takes; a test that
only waits shares them with the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def read(reports: Path) -> list[dict[str, Any]]:
    """Return one record for each test that was run."""
    found: list[dict[str, Any]] = []
    for path in sorted(reports.glob("usage-*.jsonl")):
        found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def ranked(records: list[dict[str, Any]], depth: int, most: int, by: str) -> list[str]:
    """Return the lines of a table by directory (0), file (1), function (2) or test (3)."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for record in records:
        path, _, name = record["test"].partition("::")
        group = (
            path.rpartition("/")[0],
            path,
            f"{path}::{name.partition('[')[0]}",
            record["test"],
        )[depth]
        entry = sums[group]
        entry[0] += record["cpu"]
        entry[1] += record["wall"]
        entry[2] += 1
    column = 0 if by == "cpu" else 1
    order = sorted(sums.items(), key=lambda item: -item[1][column])[:most]
    return [f"{cpu:8.1f} {wall:8.1f} {count:5.0f}  {group}" for group, (cpu, wall, count) in order]


def runs(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each run of pytest, in their order: when it began and ended."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        found[record.get("run", "")].append(record)
    start = min(record["at"] for record in records)
    lines = {}
    for name, group in found.items():
        begun = min(record["at"] for record in group) - start
        ended = max(record["at"] + record["wall"] for record in group) - start
        cpu, wall = (sum(record[key] for record in group) for key in ("cpu", "wall"))
        lines[begun, name] = (
            f"{cpu:8.1f} {wall:8.1f} {len(group):5}  {begun:4.0f}-{ended:4.0f} s  {name}"
        )
    return [lines[key] for key in sorted(lines)]


def main(arguments: list[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path)
    parser.add_argument("--most", type=int, default=40, help="rows of each table")
    parser.add_argument("--by", choices=("cpu", "wall"), default="cpu")
    chosen = parser.parse_args(arguments)
    records = read(chosen.reports)
    if not records:
        print(f"no usage-*.jsonl in {chosen.reports}: REPORTS={chosen.reports} make test-all")
        return 1
    cpu, wall = sum(r["cpu"] for r in records), sum(r["wall"] for r in records)
    print(f"{cpu:8.1f} {wall:8.1f} {len(records):5}  all")
    print(f"\n{'cpu':>8} {'wall':>8} {'tests':>5}  runs, from their first test to their last")
    print("\n".join(runs(records)))
    for depth, name in enumerate(("directories", "files", "functions", "tests")):
        print(f"\n{'cpu':>8} {'wall':>8} {'tests':>5}  {name}")
        print("\n".join(ranked(records, depth, chosen.most, chosen.by)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
