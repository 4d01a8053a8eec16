"""Operations that several contenders do in the same way."""

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
    """Runs a command without a sandbox; returns its output."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    expect(process.returncode == 0, f"{argv[0]} ended with {process.returncode}")
    return out


async def import_seconds(module: str) -> float:
    """What importing a module costs a fresh interpreter, by its own clock."""
    return float(await spawn(sys.executable, "-I", "-c", importing(module)))


def moving_files(
    path: str,
    put: Callable[[str, bytes], Awaitable[object]],
    get: Callable[[str], Awaitable[bytes]],
    remove: Callable[[str], Awaitable[object]],
) -> dict[str, Operation]:
    """64 MiB into a new file, and out of one. All the rest is done before the clock runs.

    A new one, because to write over a file is to free its memory too, which then helps or hinders
    whoever has the next turn.
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
    """Removes a file of this machine."""
    os.unlink(path)
