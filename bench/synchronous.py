"""The cost of a synchronous call beside the asynchronous one: ``python -m bench.synchronous``.

Both faces alternate in one process, each with a session of its own, in blocks of calls in a row.
The limit is 0.3 ms a call. After a pause (``--pause-s 0.005``) it is more: the thread of the loop
and that of the caller are then woken on idle cores, 0.1 ms each time on a virtual machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from union import sandbox as sb
from union.sandbox import sync

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_OVERHEAD_MS = 0.3
BLOCK = 10
"""Calls of one face before the other takes its turn."""
CALLS: dict[str, Callable[[Any], Any]] = {
    "stat": lambda session: session.stat("."),
    "get_bytes, 10 kB": lambda session: session.get_bytes("data"),
    'exec("true")': lambda session: session.exec("true"),
    'run_code("pass")': lambda session: session.run_code("pass"),
}


def measure(backend: str, rounds: int, pause_s: float = 0.0) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds of each call: asynchronous, synchronous."""
    found = {}
    with asyncio.Runner() as runner, ExitStack() as stack:
        other = runner.run(sb.on_device.session(backend=backend).open())
        stack.callback(lambda: runner.run(other.close()))
        own = stack.enter_context(sync.on_device.session(backend=backend))
        runner.run(other.put_bytes("data", bytes(10_000)))
        own.put_bytes("data", bytes(10_000))
        for name, call in CALLS.items():
            samples: tuple[list[float], list[float]] = ([], [])
            for _ in range(max(1, rounds // BLOCK)):
                samples[0].extend(runner.run(_asynchronous(call, other, pause_s)))
                samples[1].extend(_synchronous(call, own, pause_s))
            found[name] = tuple(statistics.median(one) * 1000 for one in samples)
    return found  # type: ignore[return-value]  # pairs


async def _asynchronous(call: Callable[[Any], Any], session: Any, pause_s: float) -> list[float]:
    taken = []
    for _ in range(BLOCK):
        begun = time.perf_counter()
        await call(session)
        taken.append(time.perf_counter() - begun)
        await asyncio.sleep(pause_s)
    return taken


def _synchronous(call: Callable[[Any], Any], session: Any, pause_s: float) -> list[float]:
    taken = []
    for _ in range(BLOCK):
        begun = time.perf_counter()
        call(session)
        taken.append(time.perf_counter() - begun)
        time.sleep(pause_s)
    return taken


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a call costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="userns")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds between two calls")
    options = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'call':20} {'async ms':>9} {'sync ms':>9} {'more':>7}")
    for name, (plain, blocking) in measure(
        options.backend, options.rounds, options.pause_s
    ).items():
        worst = max(worst, blocking - plain)
        print(f"{name:20} {plain:9.3f} {blocking:9.3f} {blocking - plain:7.3f}")
    return 0 if worst <= MAX_OVERHEAD_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
