"""Our own sessions over a server on loopback: the cost of the protocol."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import sys
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from bench.peers import session as on_device
from bench.peers.operations import moving_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.peers.worker import Operation

version = on_device.version


@asynccontextmanager
async def contender(*, backend: str) -> AsyncIterator[dict[str, Operation]]:
    """Return the operations, over a server that is started for them."""
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as place:
        async with _server(backend, place, token) as endpoint:

            def make(**options: Any) -> Any:
                from union import sandbox as sb

                return sb.remote.session(endpoint=endpoint, token=token, lazy=False, **options)

            async with make() as session:
                yield {
                    "open": functools.partial(on_device.open_seconds, make),
                    "first_run": functools.partial(on_device.first_run_seconds, make),
                    "run_true": functools.partial(on_device.run_true, session),
                    "run_code": functools.partial(on_device.run_code, session),
                    "stdout": functools.partial(on_device.stream_output, session),
                    **moving_files("big", session.put_bytes, session.get_bytes, session.remove),
                }


@asynccontextmanager
async def _server(backend: str, place: str, token: str) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "union.sandbox.server", "--bind", "127.0.0.1:0", "--backend", backend),
        *("--work-dir", f"{place}/work", "--log-level", "warning"),
        env={**os.environ, "SANDBOX_SERVER_TOKEN": token},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())["ready"][0]
    finally:
        process.terminate()
        await process.wait()
