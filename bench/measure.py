"""Fair measuring: contenders take turns, so that a noisy moment hits all of them alike."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Operation = Callable[[], Awaitable[float | None]]
"""Does the thing once. May return the seconds to count, if those are not the whole of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one contender did in one benchmark."""

    benchmark: str
    contender: str
    unit: str
    """``ms``, ``MiB/s`` or ``runs/s``."""
    samples: tuple[float, ...] = field(repr=False)

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        if len(self.samples) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median

    def ratio(self, bare: Row) -> float:
        """This median as a multiple of the bare one."""
        return self.median / bare.median

    def to_dict(self, bare: Row) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "benchmark": self.benchmark,
            "contender": self.contender,
            "unit": self.unit,
            "median": round(self.median, 4),
            "spread": round(self.spread, 3),
            "ratio": round(self.ratio(bare), 3),
            "samples": len(self.samples),
        }


async def once(operation: Operation) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    own = await operation()
    return time.perf_counter() - begun if own is None else own


async def take_turns(
    contenders: dict[str, Operation], *, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of every call: one call of each contender per round, the order turning round."""
    for operation in contenders.values():
        for _ in range(warm_up):
            await operation()
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turned = number % len(names)
        for name in names[turned:] + names[:turned]:
            taken[name].append(await once(contenders[name]))
    return taken


async def sustained(
    contenders: dict[str, Operation], *, workers: int, seconds: float, slices: int = 5
) -> dict[str, list[float]]:
    """Calls per second with ``workers`` at once, measured in slices that take turns."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(slices):
        for name, operation in contenders.items():
            begun = time.perf_counter()
            end = begun + seconds / slices
            counts = await asyncio.gather(*(_until(end, operation) for _ in range(workers)))
            rates[name].append(sum(counts) / (time.perf_counter() - begun))
    return rates


async def _until(end: float, operation: Operation) -> int:
    done = 0
    while time.perf_counter() < end:
        await operation()
        done += 1
    return done


def rows(
    benchmark: str, taken: dict[str, list[float]], *, unit: str, mib: float = 0.0
) -> list[Row]:
    """Samples in seconds (or already rates) -> rows in the unit shown."""
    turned: dict[str, list[float]] = {}
    for name, samples in taken.items():
        if unit == "ms":
            turned[name] = [s * 1000 for s in samples]
        elif unit == "MiB/s":
            turned[name] = [mib / s for s in samples]
        else:
            turned[name] = samples
    return [
        Row(benchmark=benchmark, contender=name, unit=unit, samples=tuple(samples))
        for name, samples in turned.items()
    ]
