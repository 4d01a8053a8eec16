"""File calls by the helper of a machine, beside host-side ones and ``cat`` in a command.

``python -m bench.machine_files``. The three alternate in one process, each with 10 kB. The limit is
twice the host-side call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

from bench.measures import SETTLE_S

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_RATIO = 2.0
DATA = bytes(10_000)
BLOCK = 10
"""Calls of one kind before the next takes its turn."""
CALLS: dict[str, tuple[Callable[[Any], Awaitable[Any]], Callable[[Any], Awaitable[Any]]]] = {
    "write": (
        lambda session: session.put_bytes("data", DATA),
        lambda session: session.exec("cat > data", stdin=DATA),
    ),
    "read": (
        lambda session: session.get_bytes("data"),
        lambda session: session.exec("cat data"),
    ),
    "stat": (
        lambda session: session.stat("data"),
        lambda session: session.exec("stat data"),
    ),
}


async def measure(backend: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return the median milliseconds of each call: on the host, by the helper, by a command."""
    found = {}
    async with (
        sb.on_device.session(backend=backend) as plain,
        sb.on_device.session(backend=backend, persist="machine") as machine,
    ):
        for session in (plain, machine):
            await session.put_bytes("data", DATA)
        for name, (call, command) in CALLS.items():
            kinds = ((call, plain), (call, machine), (command, machine))
            samples: list[list[float]] = [[] for _ in kinds]
            for _ in range(max(1, rounds // BLOCK)):
                for taken, (perform, session) in zip(samples, kinds, strict=True):
                    taken.extend(await _block(perform, session))
            host, helper, cat = (statistics.median(taken) * 1000 for taken in samples)
            found[name] = (host, helper, cat)
    return found


async def _block(call: Callable[[Any], Awaitable[Any]], session: sb.Session) -> list[float]:
    taken = []
    for _ in range(BLOCK):
        begun = time.perf_counter()
        await call(session)
        taken.append(time.perf_counter() - begun)
        await asyncio.sleep(SETTLE_S)
    return taken


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if the helper takes more than twice as long as the host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="userns")
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'10 kB':8} {'host ms':>9} {'helper ms':>9} {'command ms':>10} {'ratio':>6}")
    for name, times in asyncio.run(measure(options.backend, options.rounds)).items():
        host, helper, command = times
        worst = max(worst, helper / host)
        print(f"{name:8} {host:9.3f} {helper:9.3f} {command:10.3f} {helper / host:6.2f}")
    return 0 if worst <= MAX_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
