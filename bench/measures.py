"""What is measured, and fairly: contenders take turns, so that a noisy moment hits all alike."""

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
"""Between turns, so that what one contender does after its call is not in the time of the next."""
BUDGET_S = 6.0
"""Of each contender in one measure. A slow one takes part in fewer rounds."""
LIMIT_S = 20.0
"""Of one measure: on a busy machine there are fewer rounds, not a longer run."""
FEWEST = 3
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that every contender is asked to do, if it can."""

    name: str
    title: str
    unit: str
    """``ms`` is a time, so less is better. ``MiB/s`` and ``runs/s`` are rates, so more is."""
    operation: str
    rounds: int
    bare: str
    """What stands for it where there is no sandbox."""
    at_once: int = 1
    slice_s: float = 0.0
    """Seconds of a slice, if it is about how much can be done in a while."""
    mib: float = 0.0

    def value(self, seconds: float) -> float:
        """Seconds of one call, in the unit shown."""
        return seconds * 1000 if self.unit == "ms" else self.mib / seconds


def _time(name: str, title: str, rounds: int, bare: str) -> Measure:
    return Measure(name=name, title=title, unit="ms", operation=name, rounds=rounds, bare=bare)


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


class _Turns:
    """One measure: its samples so far, and who has dropped out of it and why."""

    def __init__(self, measure: Measure, workers: list[Worker], *, scale: float) -> None:
        self.measure = measure
        self.scale = scale
        self.rounds = max(FEWEST, round(measure.rounds * scale))
        self.workers = [w for w in workers if measure.operation in w.operations]
        self.samples: dict[str, list[float]] = {w.name: [] for w in self.workers}
        self.dropped: dict[str, str] = {}
        self._every: dict[str, int] = {}
        """A contender takes part in every so many rounds."""

    async def warm_up(self) -> None:
        """Every contender once, or a few times, untimed; a slow one will have fewer turns."""
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
        """Every contender once, each time in another order."""
        first = number % max(1, len(self.workers))
        for worker in self.workers[first:] + self.workers[:first]:
            if not self.measure.slice_s and number % self._every[worker.name]:
                continue
            await asyncio.sleep(SETTLE_S)
            try:
                self.samples[worker.name].append(await self._sample(worker))
            except ContenderError as exc:
                self._drop(worker, exc)

    async def _sample(self, worker: Worker) -> float:
        measure = self.measure
        if not measure.slice_s:
            return measure.value((await worker.seconds(measure.operation))[0])
        told = await worker.ask(
            operation=measure.operation,
            at_once=measure.at_once,
            for_s=measure.slice_s * min(1.0, self.scale),
        )
        return float(told["done"] / told["seconds"])

    def _drop(self, worker: Worker, why: ContenderError) -> None:
        if worker.name == BARE:  # then there is nothing to compare with
            raise ContenderError(f"{self.measure.name}, {BARE}: {why}") from why
        self.workers.remove(worker)
        self.samples.pop(worker.name)
        self.dropped[worker.name] = str(why)


async def take_turns(
    measure: Measure, workers: list[Worker], *, scale: float, note: Note
) -> dict[str, Any]:
    """Measures one thing; returns plain values, ready for JSON."""
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
        "results": {name: summary(s, turns.samples[BARE]) for name, s in turns.samples.items()},
        "dropped": turns.dropped,
    }


def summary(samples: list[float], bare: list[float]) -> dict[str, float]:
    """The middle, the spread (half the distance of the quartiles, as a share), the tail."""
    median = statistics.median(samples)
    several = samples if len(samples) > 1 else samples * 2  # a slow one may have had one turn
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
