"""Operations that several contenders share."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from typing import TYPE_CHECKING

from bench.peers.programs import MIB, SIZE, expect, importing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bench.peers.worker import Operation


async def spawn(*argv: str) -> bytes:
    """Run a command without a sandbox; return its output."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    expect(process.returncode == 0, f"{argv[0]} ended with {process.returncode}")
    return out


async def import_seconds(module: str) -> float:
    """Return the import time of a module in a new interpreter, by its own clock."""
    return float(await spawn(sys.executable, "-I", "-c", importing(module)))


def moving_files(
    path: str,
    put: Callable[[str, bytes], Awaitable[object]],
    get: Callable[[str], Awaitable[bytes]],
    remove: Callable[[str], Awaitable[object]],
) -> dict[str, Operation]:
    """Write 64 MiB to a new file, and read them back, with all preparation outside of the clock.

    The file is new because overwriting one also frees its memory, which affects the contender that
    has the next turn.
    """
    data = functools.cache(lambda: os.urandom(MIB) * (SIZE // MIB))

    is_there = False

    async def put_it() -> float:
        nonlocal is_there
        content = data()
        if is_there:
            await remove(path)
        begun = time.perf_counter()
        await put(path, content)
        taken = time.perf_counter() - begun
        is_there = True
        return taken

    async def get_it() -> float:
        if not is_there:
            await put_it()
        begun = time.perf_counter()
        read = await get(path)
        taken = time.perf_counter() - begun
        expect(len(read) == SIZE, f"{len(read)} bytes came back instead of {SIZE}")
        return taken

    return {"put": put_it, "get": get_it}


async def unlink(path: str) -> None:
    """Remove a local file."""
    os.unlink(path)
