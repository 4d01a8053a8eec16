"""`make bench`: measure on this machine, as multiples of the same work without a sandbox."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import chart, keep, report
from bench.contenders import BARE, OURS, REMOTE, ROOT, ContenderError, Worker, all_contenders
from bench.idle import held_contexts, idle_sessions
from bench.measures import MEASURES, MORE, take_turns
from bench.server import server

from union import sandbox as sb

if TYPE_CHECKING:
    from bench.contenders import Contender

KEPT = ROOT / "bench" / "results"
"""Directory of complete results, which the page shows. Partial runs go to SCRATCH."""
PAGE = ROOT / "docs" / "benchmarks.md"
SCRATCH = ROOT / ".cache" / "bench"
IDLE, CONTEXTS = "idle", "contexts"
QUICK = 0.1


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    whole = [*(measure.name for measure in MEASURES), IDLE]
    known = [*whole, *(measure.name for measure in MORE), CONTEXTS]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"what to measure: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help=f"the same as --scale {QUICK}")
    parser.add_argument("--scale", type=float, help="multiplies rounds and seconds (default: 1)")
    parser.add_argument("--without-peers", action="store_true", help="only bare and ours")
    parser.add_argument("--output", type=Path, help="the directory for the JSON and the chart")
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="measure nothing; rewrite the page and the chart from the last complete run",
    )
    keep.add_option(parser)
    options = parser.parse_args(given)
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    if options.scale is None:
        options.scale = QUICK if options.quick else 1.0
    if not 0 < options.scale <= 10:
        parser.error("--scale must be more than 0 and at most 10")
    options.whole = options.scale >= 1 and not options.names and not options.without_peers
    options.names = options.names or whole
    options.kept = options.whole and options.output is None
    options.output = options.output or (KEPT if options.whole else SCRATCH)
    return options


class Progress:
    """Progress on one changing line of a terminal, or a line for each step in a pipe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step = 0
        self._title = ""
        self._watched = sys.stderr.isatty()
        self._begun = time.monotonic()

    def step(self, title: str) -> None:
        """Start a new step."""
        self._step += 1
        self._title = title
        if self._watched:
            self.note("")
        else:
            print(self._line(), file=sys.stderr, flush=True)

    def note(self, detail: str) -> None:
        """Show the progress of the step."""
        if self._watched:
            print(f"\r\033[K{self._line()}  {detail}", end="", file=sys.stderr, flush=True)

    def _line(self) -> str:
        spent = time.monotonic() - self._begun
        return f"{spent:4.0f} s  {self._step} of {self._steps}  {self._title}"

    def done(self) -> None:
        """Clear the line."""
        if self._watched:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def about() -> dict[str, Any]:
    """Describe the environment of the measurement, without names of persons or machines."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "version": sb.__version__,
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "root": os.geteuid() == 0,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


async def measure(options: argparse.Namespace, port: int) -> report.Results:
    """Run the selected measures in order, with the contenders alternating."""
    contenders = all_contenders(port, peers=not options.without_peers)
    results: report.Results = {"about": about(), "measures": [], "left_out": {}}
    wanted = [m for m in (*MEASURES, *MORE) if m.name in options.names]
    last = sum(name in options.names for name in (IDLE, CONTEXTS))
    progress = Progress(1 + len(wanted) + last)
    progress.step("start all contenders")
    async with AsyncExitStack() as stack:
        workers = await _start(contenders, stack, results["left_out"])
        results["about"]["versions"] = {w.name: _version(w) for w in workers}
        for one in wanted:
            progress.step(one.title.replace("`", ""))
            results["measures"].append(
                await take_turns(one, workers, scale=options.scale, note=progress.note)
            )
    results["idle"] = {"results": [], "dropped": {}}
    if IDLE in options.names:
        progress.step("idle sessions")
        # The memory of a remote session belongs to the server.
        able = [
            w.contender for w in workers if "open" in w.operations and w.name not in {BARE, REMOTE}
        ]
        results["idle"] = await idle_sessions(able, scale=options.scale, note=progress.note)
    results["contexts"] = []
    if CONTEXTS in options.names:
        progress.step("open contexts")
        by_name = {w.name: w.contender for w in workers}
        results["contexts"] = await held_contexts(
            by_name[OURS], by_name[BARE], scale=options.scale, note=progress.note
        )
    results["about"]["load_after"] = round(os.getloadavg()[0], 2)
    progress.done()
    return results


async def _start(
    contenders: list[Contender], stack: AsyncExitStack, left_out: dict[str, str]
) -> list[Worker]:
    workers = []
    for contender in contenders:
        try:
            worker = await Worker(contender).start()
        except ContenderError as exc:
            if contender.name in {BARE, OURS}:
                raise
            left_out[contender.name] = str(exc)
        else:
            stack.push_async_callback(worker.close)
            workers.append(worker)
    return workers


def _version(worker: Worker) -> str:
    # Wrapper programs run under our own interpreter, which is listed anyway.
    return "" if worker.contender.driver == "command" else worker.version


def write(options: argparse.Namespace, results: report.Results) -> None:
    """Write the results as JSON and as a chart and, after a complete run, into the page."""
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (options.output / "latest.json").write_text(f"{text}\n", encoding="utf-8")
    (options.output / "latest.svg").write_text(chart.svg(results), encoding="utf-8")
    if options.kept:
        report.put_in(PAGE, results)


def main() -> int:
    """Measure, print and write the results."""
    options = arguments()
    if options.rewrite:
        results = json.loads((KEPT / "latest.json").read_text(encoding="utf-8"))
        write(arguments([]), results)
        return 0
    if options.kept and not keep.may_write(given=options.write):
        options.kept, options.output = False, SCRATCH
    try:
        with server() as port:
            results = asyncio.run(measure(options, port))
    except ContenderError as exc:
        print(f"\nThis machine cannot run the benchmark: {exc}", file=sys.stderr)
        return 1
    print(report.terminal(results))
    write(options, results)
    print(f"written: {os.path.relpath(options.output / 'latest.json')}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
