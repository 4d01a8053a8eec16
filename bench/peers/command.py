"""A command started by asyncio, with or without a wrapper program that isolates it.

Without a wrapper it is the bare contender, the baseline of all comparisons.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import sys
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bench.peers.kernel import kernels, spawning
from bench.peers.operations import import_seconds, moving_files, spawn, unlink
from bench.peers.programs import (
    ANSWER,
    DOWNLOAD,
    MIB,
    SIZE,
    SNIPPET,
    WRITE,
    client,
    expect,
    seconds_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.peers.worker import Operation


def version() -> str:
    """Version of the interpreter, which starts the commands."""
    return platform.python_version()


@asynccontextmanager
async def contender(*, prefix: list[str], port: int) -> AsyncIterator[dict[str, Operation]]:
    """Return the operations; only the bare contender has all of them."""

    async def run_true() -> None:
        await spawn(*prefix, "/bin/sh", "-c", "true")

    async def run_code() -> None:
        printed = await spawn(*prefix, sys.executable, "-c", SNIPPET)
        expect(printed == ANSWER.encode(), "a wrong answer")

    operations: dict[str, Operation] = {"run_true": run_true, "run_code": run_code}
    if prefix:
        yield operations
        return
    with tempfile.TemporaryDirectory() as place:
        operations |= moving_files(os.path.join(place, "plain"), _put, _get, unlink)
        operations |= {
            "open": functools.partial(_quiet, "pass"),
            "first_run": run_true,
            "run_true_cold": run_true,
            "run_true_allowlist": run_true,
            "run_true_machine": run_true,
            "run_code_cold": run_code,
            "stdout": _stdout,
            "request": functools.partial(_fetch, port, 1),
            "download": functools.partial(_fetch, port, DOWNLOAD),
            "download_by_proxy": functools.partial(_fetch, port, DOWNLOAD),
            "import": functools.partial(import_seconds, "asyncio"),
            "import_on_device": functools.partial(import_seconds, "asyncio"),
        }
        async with kernels() as cells:
            yield operations | cells | {"run_code_preloaded": spawning(spawn, sys.executable)}


async def _quiet(source: str) -> None:
    await spawn(sys.executable, "-c", source)


async def _fetch(port: int, size: int) -> float:
    source = client("127.0.0.1", port, size)
    return seconds_of(await spawn(sys.executable, "-c", source), size)


async def _stdout() -> None:
    process = await asyncio.create_subprocess_shell(
        WRITE, stdout=asyncio.subprocess.PIPE, limit=MIB
    )
    if process.stdout is None:
        raise RuntimeError("no pipe")
    size = 0
    while chunk := await process.stdout.read(256 * 1024):
        size += len(chunk)
    await process.wait()
    expect(size == SIZE, f"{size} bytes came through instead of {SIZE}")


async def _put(path: str, data: bytes) -> None:
    await asyncio.to_thread(_write, path, data)


async def _get(path: str) -> bytes:
    return await asyncio.to_thread(_read, path)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
