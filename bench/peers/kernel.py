"""Cells of ipykernel through jupyter_client, and cells of a context."""

from __future__ import annotations

import functools
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.programs import expect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.peers.worker import Operation

CELL = "x = 1"
HEAVY = "import numpy, pandas"
PATIENCE_S = 60.0


@asynccontextmanager
async def kernels() -> AsyncIterator[dict[str, Operation]]:
    """Yield the operations with ipykernel; nothing if it is not installed."""
    try:
        from jupyter_client.manager import AsyncKernelManager
    except ImportError:
        yield {}
        return
    started: list[tuple[Any, Any]] = []

    async def start() -> tuple[Any, Any]:
        manager = AsyncKernelManager(kernel_name="python3")
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=PATIENCE_S)
        return manager, client

    async def stop(manager: Any, client: Any) -> None:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)

    async def run(client: Any, code: str = CELL) -> None:
        reply = await client.execute_interactive(code, store_history=False, timeout=PATIENCE_S)
        expect(reply["content"]["status"] == "ok", "a cell failed")

    async def cell() -> None:
        if not started:
            started.append(await start())
        await run(started[0][1])

    async def context() -> float:
        begun = time.perf_counter()
        manager, client = await start()
        await run(client)
        taken = time.perf_counter() - begun
        await stop(manager, client)
        return taken

    async def hold() -> None:
        started.append(await start())
        await run(started[-1][1], HEAVY)

    try:
        yield {"cell": cell, "context": context, "hold_contexts": hold}
    finally:
        for one in started:
            await stop(*one)


@asynccontextmanager
async def contexts(make: Callable[..., Any]) -> AsyncIterator[dict[str, Operation]]:
    """Yield the same operations with contexts of a session, and code with preloaded modules."""
    session = await make(preload=("numpy", "pandas")).open()
    held: list[Any] = []

    async def run(context: Any) -> None:
        result = await context.run(CELL)
        expect(result.error is None, "a cell failed")

    async def cell() -> None:
        if not held:
            held.append(await session.context().open())
        await run(held[0])

    async def context() -> float:
        begun = time.perf_counter()
        async with session.context() as opened:
            await run(opened)
            return time.perf_counter() - begun

    async def hold() -> None:
        held.append(await session.context().open())
        await run(held[-1])

    async def preloaded() -> None:
        expect(await session.run_code(HEAVY) == "", "unexpected output")

    try:
        yield {
            "cell": cell,
            "context": context,
            "hold_contexts": hold,
            "run_code_preloaded": preloaded,
        }
    finally:
        for one in held:
            await one.close()
        await session.close()


def spawning(spawn: Callable[..., Awaitable[object]], python: str) -> Operation:
    """Return the same imports in a new interpreter."""

    async def imports() -> None:
        await spawn(python, "-c", HEAVY)

    return functools.partial(imports)
