"""Sessions of `union.sandbox`, from whichever distribution the interpreter has installed.

It uses only the documented interface, so it works with this package and compatible ones.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from bench.peers.kernel import contexts
from bench.peers.operations import import_seconds, moving_files, unlink
from bench.peers.programs import (
    ANSWER,
    DOWNLOAD,
    NAME,
    SIZE,
    SNIPPET,
    WRITE,
    client,
    expect,
    seconds_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from bench.peers.worker import Operation


def version() -> str:
    """Version of the distribution."""
    return metadata.version("unionai-sandbox")


@asynccontextmanager
async def contender(
    *, backend: str, port: int, ours: bool, idle: bool = False, holds_contexts: bool = False
) -> AsyncIterator[dict[str, Operation]]:
    """Return the operations; ``idle`` is for a process that only holds sessions or contexts."""

    def make(**options: Any) -> Any:
        from union import sandbox as sb

        if not ours:  # The interpreter may be outside the default paths of a distribution.
            options.setdefault("read_only_paths", [sys.base_prefix])
        return sb.on_device.session(backend=backend, **options)

    if idle and holds_contexts:
        async with contexts(make) as cells:
            yield cells
        return
    if idle:
        async with _holding(make) as hold:
            yield {"hold": hold}
        return
    with tempfile.TemporaryDirectory() as place, _name_on_loopback():
        async with make() as session, make(host_work_dir=place) as files:
            operations = {
                "open": functools.partial(open_seconds, make),
                "first_run": functools.partial(first_run_seconds, make),
                "run_true": functools.partial(run_true, session),
                "run_code": functools.partial(run_code, session),
                "import": functools.partial(import_seconds, "union.sandbox"),
                "import_on_device": functools.partial(import_seconds, "union.sandbox.on_device"),
                **moving_files(f"{place}/big", files.put_bytes, files.get_bytes, unlink),
                **_network(session, port, by_name=ours),
            }
            if not ours:
                async with _pinned(make) as pinned:
                    yield (operations | pinned | {"stdout": functools.partial(_collected, session)})
                return
            # A backend without namespaces has no machine, and the measure leaves it out.
            has_machine = backend in {"bubblewrap", "userns"}
            persist = {"persist": "machine"} if has_machine else {}
            async with (
                make(warm=0) as cold,
                make(**persist) as machine,
                contexts(make) as cells,
            ):
                if has_machine:
                    operations["run_true_machine"] = functools.partial(run_true, machine)
                yield (
                    operations
                    | cells
                    | {
                        "run_true_cold": functools.partial(run_true, cold),
                        "run_code_cold": functools.partial(run_code, cold),
                        "stdout": functools.partial(stream_output, session),
                    }
                )


@asynccontextmanager
async def _pinned(make: Any) -> AsyncIterator[dict[str, Operation]]:
    """Return ``run("true")`` with a directory of the work dir shown read-only."""
    with tempfile.TemporaryDirectory() as place:
        kept = os.path.join(place, "kept")
        os.mkdir(kept)
        async with make(host_work_dir=place, read_only_paths=[kept, sys.base_prefix]) as session:
            yield {"run_true_pinned": functools.partial(run_true, session)}


@asynccontextmanager
async def _holding(make: Any) -> AsyncIterator[Operation]:
    held: list[Any] = []

    async def hold() -> None:
        held.append(await make().open())

    try:
        yield hold
    finally:
        for session in held:
            await session.close()


async def open_seconds(make: Any) -> float:
    """Open a session."""
    begun = time.perf_counter()
    session = await make().open()
    taken = time.perf_counter() - begun
    await session.close()
    return taken


async def first_run_seconds(make: Any) -> float:
    """Run the first command of an open session."""
    async with make() as session:
        begun = time.perf_counter()
        await run_true(session)
        return time.perf_counter() - begun


async def run_true(session: Any, **options: Any) -> None:
    """Run the shortest command."""
    process = await session.run("true", stdout=True, **options)
    await process.communicate()
    expect(process.returncode == 0, f"true ended with {process.returncode}")


async def run_code(session: Any) -> None:
    """Run a short script."""
    expect(await session.run_code(SNIPPET) == ANSWER, "a wrong answer")


async def stream_output(session: Any) -> None:
    """Stream a large output."""
    process = await session.run(WRITE, stdout=True)
    size = 0
    async for chunk in process.iter_stdout():
        size += len(chunk)
    await process.wait()
    expect(size == SIZE, f"{size} bytes came through instead of {SIZE}")


async def _collected(session: Any) -> None:
    process = await session.run(WRITE, stdout=True)
    out, _ = await process.communicate()
    expect(len(out) == SIZE, f"{len(out)} bytes came through instead of {SIZE}")


def _network(session: Any, port: int, *, by_name: bool) -> dict[str, Operation]:
    """Run a program that fetches from loopback, with an allow-list of that service only.

    By name where the name can be made to resolve to loopback; otherwise by address, through the
    proxy that the program is given.
    """
    host = NAME if by_name else "127.0.0.1"
    listed = {"network_mode": "allowlist", "network_allowlist": [NAME, "127.0.0.1"]}

    async def fetch(size: int, *, by_proxy: bool) -> float:
        source = client(host, port, size, by_proxy=by_proxy)
        return seconds_of(await session.run_code(source, **listed), size)

    return {
        "run_true_allowlist": functools.partial(run_true, session, **listed),
        "request": functools.partial(fetch, 1, by_proxy=not by_name),
        "download": functools.partial(fetch, DOWNLOAD, by_proxy=not by_name),
        "download_by_proxy": functools.partial(fetch, DOWNLOAD, by_proxy=True),
    }


@contextmanager
def _name_on_loopback() -> Iterator[None]:
    """Resolve NAME to 127.0.0.1 in this process, which resolves names for its sandboxes."""
    real = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host in {NAME, NAME.encode()} else host, *args, **options)

    socket.getaddrinfo = lookup
    try:
        yield
    finally:
        socket.getaddrinfo = real
