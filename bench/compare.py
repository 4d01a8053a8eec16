"""Two installations of this package beside each other: ``python -m bench.compare PYTHON``.

PYTHON is the interpreter of a virtualenv with the other installation, for example one of an
earlier version. Each runs in its own process, and they alternate call by call. The ratio is this
installation's median over the other's, for rates the reverse: above 1 this one is slower.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders import Contender, ContenderError, Worker
from bench.measures import MEASURES, SETTLE_S, Measure

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER, OWN = "other", "this"
DEFAULT = (
    *("run_true", "run_true_pinned", "run_code", "open", "first_run"),
    *("run_true_x1", "run_true_x4", "run_code_x1", "run_code_x4", "stdout"),
)
REMOTE = ("remote run_true", "remote run_code")
PINNED = Measure(
    name="run_true_pinned",
    title="with a read-only path in the work dir",
    unit="ms",
    operation="run_true_pinned",
    rounds=300,
    bare="",
)


def _measures(names: list[str]) -> Iterator[tuple[str, Measure]]:
    known = {one.name: one for one in (*MEASURES, PINNED)}
    for name in names:
        driver, _, plain = name.rpartition(" ")
        yield driver or "session", known[plain]


async def _turns(
    measure: Measure, pair: list[Worker], *, scale: float, pause_s: float
) -> list[list[float]]:
    samples: list[list[float]] = [[], []]
    for worker in pair:
        await worker.seconds(measure.operation, times=2)
    for number in range(max(4, round(measure.rounds * scale))):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            await asyncio.sleep(pause_s)
            samples[which].append(await _sample(measure, pair[which]))
    return samples


async def _sample(measure: Measure, worker: Worker) -> float:
    """Return milliseconds of one call."""
    if not measure.slice_s:
        return (await worker.seconds(measure.operation))[0] * 1000
    reply = await worker.request(
        operation=measure.operation, at_once=measure.at_once, for_s=measure.slice_s / 2
    )
    return float(reply["seconds"] / reply["done"]) * 1000


async def compare(options: argparse.Namespace) -> None:
    """Measure and print one line for each name."""
    async with AsyncExitStack() as stack:
        pairs: dict[str, list[Worker]] = {}
        for driver in {one for one, _ in _measures(options.names)}:
            given = {"backend": options.backend}
            if driver == "session":
                given |= {"port": 9, "ours": False}
            for name, python in ((OWN, sys.executable), (OTHER, str(options.python))):
                contender = Contender(name=name, driver=driver, options=given, python=python)
                worker = await Worker(contender).start()
                stack.push_async_callback(worker.close)
                pairs.setdefault(driver, []).append(worker)
        print(f"{options.backend:24} {'this ms':>9} {'other ms':>9} {'ratio':>6} {'quartile':>8}")
        for driver, measure in _measures(options.names):
            own, other = await _turns(
                measure, pairs[driver], scale=options.scale, pause_s=options.pause_s
            )
            middle = [statistics.median(one) for one in (own, other)]
            low = [statistics.quantiles(one, n=4)[0] for one in (own, other)]
            if options.verbose:
                for one in (own, other):
                    print(" ".join(f"{q:.2f}" for q in statistics.quantiles(one, n=10)))
            title = measure.name if driver == "session" else f"{driver} {measure.name}"
            print(
                f"{title:24} {middle[0]:9.3f} {middle[1]:9.3f} {middle[0] / middle[1]:6.3f} "
                f"{low[0] / low[1]:8.3f}",
                flush=True,
            )


def main(given: list[str] | None = None) -> int:
    """Compare the two installations."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("python", type=Path, help="interpreter of the other installation")
    parser.add_argument("names", nargs="*", default=[*DEFAULT, *REMOTE])
    parser.add_argument("--backend", default="userns")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the rounds")
    parser.add_argument("--pause-s", type=float, default=SETTLE_S, help="before each call")
    parser.add_argument("--verbose", action="store_true", help="print deciles too")
    options = parser.parse_args(given)
    try:
        asyncio.run(compare(options))
    except ContenderError as exc:
        print(f"The comparison stopped: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
