"""The measures. Contenders alternate, so that noise affects all of them equally."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.contenders import BARE, ContenderError
from bench.peers.programs import DOWNLOAD, MIB, SIZE

if TYPE_CHECKING:
    from bench.contenders import Worker

SETTLE_S = 0.005
"""Pause between turns, so that clean-up of one contender is not measured in the next."""
BUDGET_S = 6.0
"""Time budget of each contender in one measure. A slow one takes part in fewer rounds."""
LIMIT_S = 14.0
"""Time budget of one measure: a busy machine gets fewer rounds, not a longer run."""
FEWEST = 3
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One operation that every contender performs if it supports it."""

    name: str
    title: str
    unit: str
    """``ms`` is a time, so less is better. ``MiB/s`` and ``runs/s`` are rates, so more is."""
    operation: str
    rounds: int
    bare: str
    """The equivalent without a sandbox."""
    at_once: int = 1
    slice_s: float = 0.0
    """Seconds of a slice, for measures of throughput."""
    mib: float = 0.0
    settle_s: float = SETTLE_S
    in_a_row: int = 1
    """Calls of one turn, each a sample."""
    beside: str = ""
    """An operation of the same contender that alternates with this one, to compare with."""

    def value(self, seconds: float) -> float:
        """Convert the seconds of one call to the unit shown."""
        return seconds * 1000 if self.unit == "ms" else self.mib / seconds


def _time(name: str, title: str, rounds: int, bare: str, **more: Any) -> Measure:
    given = {"operation": name} | more
    return Measure(name=name, title=title, unit="ms", rounds=rounds, bare=bare, **given)


def _bytes(name: str, title: str, mib: float, bare: str) -> Measure:
    return Measure(
        name=name, title=title, unit="MiB/s", operation=name, rounds=12, bare=bare, mib=mib
    )


def _sustained(operation: str, title: str, at_once: int, slice_s: float, bare: str) -> Measure:
    return Measure(
        name=f"{operation}_x{at_once}",
        title=f"{title}, {at_once} at once" if at_once > 1 else f"{title}, one after another",
        unit="runs/s",
        operation=operation,
        rounds=5,
        bare=bare,
        at_once=at_once,
        slice_s=slice_s,
    )


_SH, _PYTHON = "`sh -c true`", '`python -c "print(2+2)"`'
_TRUE, _CODE = '`run("true")`', '`run_code("print(2+2)")`'
_FETCH = "the same without a sandbox"
_HEAVY, _KERNEL = '`python -c "import numpy, pandas"`', "ipykernel"

MEASURES: tuple[Measure, ...] = (
    _time("open", "open a session", 40, "`python -c pass`"),
    _time("first_run", f"its first {_TRUE}", 40, _SH),
    _time("run_true", _TRUE, 300, _SH),
    _time("run_true_cold", f"{_TRUE}, `warm=0`", 100, _SH),
    _time("run_true_allowlist", f"{_TRUE}, `allowlist`", 100, _SH),
    _time("run_code", _CODE, 100, _PYTHON),
    _time("run_code_cold", f"{_CODE}, `warm=0`", 40, _PYTHON),
    _time("request", "an allow-listed request", 40, _FETCH),
    _time("import", "`import union.sandbox`", 20, "`import asyncio`"),
    _time("import_on_device", "`import union.sandbox.on_device`", 10, "`import asyncio`"),
    _sustained("run_true", _TRUE, 1, 0.4, _SH),
    _sustained("run_true", _TRUE, 4, 0.6, _SH),
    _sustained("run_true", _TRUE, 16, 0.4, _SH),
    _sustained("run_code", _CODE, 1, 0.4, _PYTHON),
    _sustained("run_code", _CODE, 4, 0.4, _PYTHON),
    _sustained("run_code", _CODE, 16, 0.4, _PYTHON),
    _bytes("stdout", "64 MiB of output", SIZE / MIB, "a pipe read by asyncio"),
    _bytes("put", "64 MiB in: `put_bytes`", SIZE / MIB, "a file written"),
    _bytes("get", "64 MiB out: `get_bytes`", SIZE / MIB, "a file read"),
    _bytes("download", "256 MiB, allow-listed", DOWNLOAD / MIB, _FETCH),
    _bytes("download_by_proxy", "256 MiB, by the HTTP proxy", DOWNLOAD / MIB, _FETCH),
)
MORE: tuple[Measure, ...] = (
    _time("run_true_machine", f'{_TRUE}, `persist="machine"`', 300, _SH, beside="run_true"),
    _time("run_code_preloaded", "`run_code` with pandas preloaded", 40, _HEAVY),
    _time("cell", "a cell of a context, in a row", 40, _KERNEL, in_a_row=10),
    _time("cell_after_pause", "a cell of a context, after a pause", 100, _KERNEL, operation="cell"),
    # A warm start: what the last one took is prepared again.
    _time("context", "open a context, first cell", 20, "the same with ipykernel", settle_s=0.1),
    _sustained("run_code_preloaded", "`run_code` with pandas preloaded", 1, 1.0, _HEAVY),
)
"""Measured when they are named; not part of the complete run, whose results are kept."""


class _Turns:
    """The samples of one measure so far, and the contenders that dropped out, with the reasons."""

    def __init__(self, measure: Measure, workers: list[Worker], *, scale: float) -> None:
        self.measure = measure
        self.scale = scale
        self.rounds = max(FEWEST, round(measure.rounds * scale))
        self.workers = [w for w in workers if measure.operation in w.operations]
        self.samples: dict[str, list[float]] = {w.name: [] for w in self.workers}
        self.beside: dict[str, list[float]] = {w.name: [] for w in self.workers}
        self.dropped: dict[str, str] = {}
        self._every: dict[str, int] = {}
        """Each contender takes part in every n-th round."""

    async def warm_up(self) -> None:
        """Run every contender without timing, and give slow ones fewer turns."""
        for worker in tuple(self.workers):
            try:
                first = await worker.seconds(self.measure.operation)
                again = await worker.seconds(self.measure.operation) if first[0] < 1 else first
            except ContenderError as exc:
                self._drop(worker, exc)
            else:
                turns = max(FEWEST, BUDGET_S * self.scale / again[0])
                self._every[worker.name] = max(1, math.floor(self.rounds / turns))

    async def turn(self, number: int) -> None:
        """Run every contender once, in a new order each time."""
        first = number % max(1, len(self.workers))
        for worker in self.workers[first:] + self.workers[:first]:
            if not self.measure.slice_s and number % self._every[worker.name]:
                continue
            try:
                await self._sample(worker, number)
            except ContenderError as exc:
                self._drop(worker, exc)

    async def _sample(self, worker: Worker, number: int) -> None:
        measure = self.measure
        kept = [(measure.operation, self.samples[worker.name])]
        if measure.beside in worker.operations:
            kept.insert(number % 2, (measure.beside, self.beside[worker.name]))
        for operation, samples in kept:
            await asyncio.sleep(measure.settle_s)
            if not measure.slice_s:
                taken = await worker.seconds(operation, measure.in_a_row)
                samples.extend(map(measure.value, taken))
                continue
            reply = await worker.request(
                operation=operation,
                at_once=measure.at_once,
                for_s=measure.slice_s * min(1.0, self.scale),
            )
            samples.append(float(reply["done"] / reply["seconds"]))

    def _drop(self, worker: Worker, why: ContenderError) -> None:
        if worker.name == BARE:  # There is nothing to compare with.
            raise ContenderError(f"{self.measure.name}, {BARE}: {why}") from why
        self.workers.remove(worker)
        self.samples.pop(worker.name)
        self.dropped[worker.name] = str(why)


async def take_turns(
    measure: Measure, workers: list[Worker], *, scale: float, note: Note
) -> dict[str, Any]:
    """Run one measure; return plain values for JSON."""
    turns = _Turns(measure, workers, scale=scale)
    await turns.warm_up()
    end = time.monotonic() + LIMIT_S * scale
    for number in range(turns.rounds):
        if number >= FEWEST and time.monotonic() > end:
            break
        note(f"round {number + 1} of {turns.rounds}")
        await turns.turn(number)
    return {
        "name": measure.name,
        "title": measure.title,
        "unit": measure.unit,
        "bare": measure.bare,
        "results": {
            name: summary(samples, turns.samples[BARE]) | _beside(samples, turns.beside[name])
            for name, samples in turns.samples.items()
        },
        "dropped": turns.dropped,
    }


def _beside(samples: list[float], other: list[float]) -> dict[str, float]:
    """Return the ratio to what alternated with it, if something did."""
    if not other:
        return {}
    return {"beside": _rounded(statistics.median(samples) / statistics.median(other))}


def summary(samples: list[float], bare: list[float]) -> dict[str, float]:
    """Return the median, the relative spread (half the interquartile range) and the tail."""
    median = statistics.median(samples)
    several = (
        samples if len(samples) > 1 else samples * 2
    )  # A slow contender may have had only one turn.
    low, _, high = statistics.quantiles(several, n=4)
    return {
        "median": _rounded(median),
        "ratio": _rounded(median / statistics.median(bare)),
        "spread": _rounded((high - low) / 2 / median),
        "p99": _rounded(statistics.quantiles(several, n=100, method="inclusive")[98]),
        "samples": len(samples),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
