"""Contexts, preloaded modules, machines and the synchronous face, beside their targets.

``python -m bench.targets``, and the last part of ``make bench``. Each row is a ratio to
the same work done another way in the same run, or a limit in a unit of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench import keep, machine_files, report, synchronous
from bench.__main__ import CONTEXTS, KEPT, PAGE, SCRATCH, measure
from bench.contenders import BARE, OURS, ContenderError
from bench.measures import MORE
from bench.server import server

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = "<!-- targets: begin, written by make bench -->"
END = "<!-- targets: end -->"
NAMES = ("run_code_x1", "run_code_x4", *(m.name for m in MORE), CONTEXTS)
USERNS = f"{OURS} userns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value and its target."""

    title: str
    compared: str
    """What a ratio compares with; empty for a value with a unit."""
    contender: str
    value: float
    sense: Literal["at most", "at least"]
    target: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within the target."""
        return self.value <= self.target if self.sense == "at most" else self.value >= self.target


def rows(results: report.Results) -> Iterator[Row]:
    """Yield the rows of a measurement, for both backends."""
    found = {one["name"]: one["results"] for one in results["measures"]}
    for name, title, compared, sense, target in (
        ("cell", "a cell of a context, in a row", "ipykernel", "at most", 0.1),
        ("cell_after_pause", "a cell of a context, after a pause", "ipykernel", "at most", 0.1),
        ("context", "open a context, first cell", "ipykernel", "at most", 0.01),
        ("run_code_preloaded", "`run_code`, pandas preloaded", "bare", "at most", 0.05),
        ("run_code_x1", "`run_code`, one after another, rate", "bare", "at least", 3.0),
        ("run_code_x4", "`run_code`, 4 at once, rate", "bare", "at least", 2.5),
    ):
        for contender in (OURS, USERNS):
            if contender in found.get(name, {}):
                yield Row(
                    title=title,
                    compared=compared,
                    contender=contender,
                    value=found[name][contender]["ratio"],
                    sense=sense,  # type: ignore[arg-type]  # one of the two above
                    target=target,
                )
    yield from _machine_runs(found)
    yield from _memory(results["contexts"])
    for backend, times in results["machine_files"].items():
        for call, (host, helper, command) in times.items():
            for compared, other, target in (
                ("on the host", host, machine_files.MAX_RATIO),
                ("a command (`cat`, `stat`)", command, 1.0),
            ):
                yield Row(
                    title=f"{call} 10 kB in a machine",
                    compared=compared,
                    contender=_contender(backend),
                    value=helper / other,
                    sense="at most",
                    target=target,
                )
    for backend, both in results["synchronous"].items():
        for call, (plain, blocking) in both.items():
            yield Row(
                title=f"synchronous {call}: overhead",
                compared="",
                contender=_contender(backend),
                value=max(0.0, blocking - plain),
                sense="at most",
                target=synchronous.MAX_OVERHEAD_MS,
                unit="ms",
            )


def _contender(backend: str) -> str:
    return OURS if backend == "bubblewrap" else f"{OURS} {backend}"


def _machine_runs(found: dict[str, Any]) -> Iterator[Row]:
    for contender in (OURS, USERNS):
        if contender in found.get("run_true_machine", {}):
            yield Row(
                title='`run("true")`, `persist="machine"`',
                compared='`run("true")`',
                contender=contender,
                value=found["run_true_machine"][contender]["beside"],
                sense="at most",
                target=1.1,
            )


def _memory(contexts: list[dict[str, Any]]) -> Iterator[Row]:
    mib = {one["contender"]: one["mib_each"] for one in contexts}
    number = {one["contender"]: one["contexts"] for one in contexts}
    if OURS not in mib:
        return
    title = f"memory of each of {number[OURS]:,} contexts, pandas preloaded"
    if BARE in mib:
        yield Row(
            title=title,
            compared="ipykernel",
            contender=OURS,
            value=mib[OURS] / mib[BARE],
            sense="at most",
            target=0.3,
        )
    yield Row(
        title=title,
        compared="",
        contender=OURS,
        value=mib[OURS],
        sense="at most",
        target=6.0,
        unit="MiB",
    )


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the page."""
    lines = ["|  | compared with | contender | measured | target | holds |"]
    lines.append("| --- | --- | --- | --: | --: | --- |")
    for one in (Row(**values) for values in found):
        unit = f" {one.unit}" if one.unit else ""
        lines.append(
            f"| {one.title} | {one.compared or '-'} | {one.contender} | {one.value:.3g}{unit} | "
            f"{one.sense} {one.target:g}{unit} | {'yes' if one.holds else '**no**'} |"
        )
    return "\n".join(lines)


def markdown(results: report.Results) -> str:
    """Return the section of the page."""
    return f"{report.facts(results)}\n\n{table(results['rows'])}"


def collect(scale: float) -> report.Results:
    """Measure everything."""
    options = argparse.Namespace(names=NAMES, scale=scale, without_peers=True)
    with server() as port:
        results = asyncio.run(measure(options, port))
    rounds = max(10, round(200 * scale))
    results["machine_files"] = {
        backend: asyncio.run(machine_files.measure(backend, rounds))
        for backend in ("bubblewrap", "userns")
    }
    results["synchronous"] = {"userns": synchronous.measure("userns", rounds)}
    results["rows"] = [asdict(one) for one in rows(results)]
    return results


def main(given: list[str] | None = None) -> int:
    """Measure, print the table and, in a complete run, write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.targets", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies rounds and seconds")
    parser.add_argument("--output", type=Path, help="directory of the JSON, not of the page")
    parser.add_argument("--rewrite", action="store_true", help="rewrite the page from the last run")
    keep.add_option(parser)
    options = parser.parse_args(given)
    is_whole = options.rewrite or (
        options.scale >= 1 and options.output is None and keep.may_write(given=options.write)
    )
    kept = KEPT / "targets.json"
    try:
        results = json.loads(kept.read_text("utf-8")) if options.rewrite else collect(options.scale)
    except ContenderError as exc:
        print(f"This machine cannot run the benchmark: {exc}", file=sys.stderr)
        return 1
    print(table(results["rows"]))
    missed = sum(not Row(**one).holds for one in results["rows"])
    print(f"{len(results['rows']) - missed} of {len(results['rows'])} targets hold.")
    directory = options.output or (KEPT if is_whole else SCRATCH)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (directory / kept.name).write_text(f"{text}\n", encoding="utf-8")
    if is_whole:
        report.put_between(PAGE, BEGIN, END, markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
