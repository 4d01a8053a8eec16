"""One contender in a process of its own, with its own interpreter: `python -m bench.peers.worker`.

Needs nothing but the standard library and the contender. Each line on standard input is a request,
each line on standard output the answer to it, both JSON:

    -> (nothing)                                             {"operations": [...], "version": "1.0"}
    {"operation": "run_true", "times": 3}                    {"seconds": [0.0021, 0.0019, 0.002]}
    {"operation": "run_true", "at_once": 4, "for_s": 1.0}    {"done": 1893, "seconds": 1.001}
    what cannot be done                                      {"error": "why"}

At the end of its input it closes what it has open, and ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

Operation = Callable[[], Awaitable["float | None"]]
"""Does the thing once. May return the seconds to count, if those are not the whole of the call."""


async def once(operation: Operation) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    own = await operation()
    return time.perf_counter() - begun if own is None else own


async def _until(end: float, operation: Operation) -> int:
    done = 0
    while time.perf_counter() < end:
        await operation()
        done += 1
    return done


async def answer(operations: dict[str, Operation], asked: dict[str, Any]) -> dict[str, Any]:
    """Does what one request says."""
    operation = operations[asked["operation"]]
    if "times" in asked:
        return {"seconds": [await once(operation) for _ in range(asked["times"])]}
    begun = time.perf_counter()
    end = begun + asked["for_s"]
    counts = await asyncio.gather(*(_until(end, operation) for _ in range(asked["at_once"])))
    return {"done": sum(counts), "seconds": time.perf_counter() - begun}


async def serve(kind: str, options: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Opens the contender and answers until there is no more to answer."""
    # Not blocked while it waits: a contender may have work to do between two calls.
    requests = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    driver = importlib.import_module(f"bench.peers.{kind}")
    async with driver.contender(**options) as operations:
        say({"operations": sorted(operations), "version": driver.version()})
        while line := await requests.readline():
            try:
                say(await answer(operations, json.loads(line)))
            except Exception as exc:  # noqa: BLE001 - whatever a peer raises is its answer
                say({"error": f"{type(exc).__name__}: {exc}"})


def main() -> int:
    """Serves one contender: its driver, then the driver's options as JSON."""
    line = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a contender prints must not look like an answer

    def say(told: dict[str, Any]) -> None:
        print(json.dumps(told), file=line, flush=True)

    # A thousand open sessions need more descriptors than a login shell is given.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), say))
    except Exception as exc:  # noqa: BLE001 - said to whoever asked, who leaves it out
        say({"error": f"{type(exc).__name__}: {exc}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
