"""One contender in its own process and interpreter: `python -m bench.peers.worker`.

It needs only the standard library and the contender. Each line on standard input is a request, each
line on standard output a reply, both JSON:

    -> (nothing)                                             {"operations": [...], "version": "1.0"}
    {"operation": "run_true", "times": 3}                    {"seconds": [0.0021, 0.0019, 0.002]}
    {"operation": "run_true", "at_once": 4, "for_s": 1.0}    {"done": 1893, "seconds": 1.001}
    an operation that fails                                  {"error": "reason"}

At the end of its input it closes everything and exits.
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
"""Perform the operation once. May return the seconds to count instead of the call's own."""


async def once(operation: Operation) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    own = await operation()
    return time.perf_counter() - begun if own is None else own


async def _until(end: float, operation: Operation) -> int:
    done = 0
    while time.perf_counter() < end:
        await operation()
        done += 1
    return done


async def perform(operations: dict[str, Operation], request: dict[str, Any]) -> dict[str, Any]:
    """Perform one request."""
    operation = operations[request["operation"]]
    if "times" in request:
        return {"seconds": [await once(operation) for _ in range(request["times"])]}
    begun = time.perf_counter()
    end = begun + request["for_s"]
    counts = await asyncio.gather(*(_until(end, operation) for _ in range(request["at_once"])))
    return {"done": sum(counts), "seconds": time.perf_counter() - begun}


async def serve(kind: str, options: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Open the contender and reply to requests until the input ends."""
    # Wait without blocking: a contender may have work to do between two calls.
    requests = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    driver = importlib.import_module(f"bench.peers.{kind}")
    async with driver.contender(**options) as operations:
        send({"operations": sorted(operations), "version": driver.version()})
        while line := await requests.readline():
            try:
                send(await perform(operations, json.loads(line)))
            except Exception as exc:  # noqa: BLE001 - any error of a peer is its reply
                send({"error": f"{type(exc).__name__}: {exc}"})


def main() -> int:
    """Serve one contender; the arguments are its driver and the driver's options as JSON."""
    line = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Output of a contender must not look like a reply.

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=line, flush=True)

    # A thousand open sessions need more file descriptors than the default limit.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), send))
    except Exception as exc:  # noqa: BLE001 - reported to the parent, which drops the contender
        send({"error": f"{type(exc).__name__}: {exc}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
