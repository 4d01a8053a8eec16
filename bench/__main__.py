"""`make bench`: the numbers on this machine, as ratios to doing the same without a sandbox."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bench import cases

from union import sandbox as sb

if TYPE_CHECKING:
    from bench.measure import Row

RESULTS = Path(__file__).parent / "results" / "latest.json"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run; all of them if none is named")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies rounds and seconds (default: 1)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    asked = parser.parse_args()
    known = [case.__name__ for case in cases.CASES]
    if unknown := set(asked.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    if not 0 < asked.scale <= 10:
        parser.error("--scale must be more than 0 and at most 10")
    return asked


def table(rows: list[Row]) -> str:
    """Rows as a person reads them."""
    lines = [f"{'benchmark':<40} {'contender':<14} {'median':>10} {'':<6} {'± %':>5} {'x bare':>8}"]
    for name, group in groupby(rows, key=lambda row: row.benchmark):
        members = list(group)
        for row in members:
            shown = name if row is members[0] else ""
            lines.append(
                f"{shown:<40} {row.contender:<14} {row.median:>10.2f} {row.unit:<6} "
                f"{row.spread * 100:>5.0f} {row.ratio(members[0]):>8.2f}"
            )
    return "\n".join(lines)


def facts() -> dict[str, object]:
    """What the numbers depend on; nothing that names a person or a machine."""
    return {
        "version": sb.__version__,
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "root": os.geteuid() == 0,
        "load_before": os.getloadavg()[0],
    }


def write(path: Path, about: dict[str, object], rows: list[Row]) -> None:
    """The results, for a machine to compare."""
    found = [
        row.to_dict(members[0])
        for _, group in groupby(rows, key=lambda row: row.benchmark)
        for members in [list(group)]
        for row in members
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rows": found}, indent=2) + "\n", encoding="utf-8")


async def measure(asked: argparse.Namespace) -> list[Row]:
    """Runs the benchmarks that were asked for, in order."""
    found: list[Row] = []
    async with cases.bench_session() as session:
        bench = cases.Bench(session=session, scale=asked.scale)
        for case in cases.CASES:
            if not asked.names or case.__name__ in asked.names:
                print(f"{case.__name__} ...", file=sys.stderr, flush=True)
                found += await case(bench)
    return found


def main() -> int:
    """Measures, prints, writes."""
    asked = arguments()
    about = facts()
    try:
        rows = asyncio.run(measure(asked))
    except sb.BackendUnavailableError as exc:
        print(f"This machine cannot open a sandbox: {exc}", file=sys.stderr)
        return 1
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    print(table(rows))
    print("Times: less is better. Rates: more is better. Medians; ± is half the quartile distance.")
    write(asked.output, about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
