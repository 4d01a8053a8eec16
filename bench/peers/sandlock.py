"""The PyPI package `sandlock`: one policy object per concurrent command, each call in a thread."""

from __future__ import annotations

import asyncio
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from bench.peers.programs import ANSWER, SNIPPET, expect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.peers.worker import Operation

READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev")
MOST_AT_ONCE = 16


def version() -> str:
    """Version of the distribution."""
    return metadata.version("sandlock")


@asynccontextmanager
async def contender() -> AsyncIterator[dict[str, Operation]]:
    """Return the operations. It has no sessions and transfers no files."""
    from sandlock import Sandbox

    idle: list[Any] = []
    readable = [*READABLE, sys.prefix, sys.base_prefix]
    loop = asyncio.get_running_loop()

    async def run(*argv: str) -> bytes:
        sandbox = idle.pop() if idle else Sandbox(fs_readable=readable, fs_writable=["/tmp"])
        # Its call blocks, so a program with an event loop needs a thread.
        result = await loop.run_in_executor(threads, functools.partial(sandbox.run, list(argv)))
        idle.append(sandbox)
        expect(result.success, f"{argv[0]} failed: {result.stderr!r}")
        return bytes(result.stdout)

    async def run_true() -> None:
        await run("/bin/sh", "-c", "true")

    async def run_code() -> None:
        printed = await run(sys.executable, "-c", SNIPPET)
        expect(printed == ANSWER.encode(), "a wrong answer")

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        yield {"run_true": run_true, "run_code": run_code}
