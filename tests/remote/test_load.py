"""Many clients and large files: nothing is lost, memory is bounded on both sides."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.remote.conftest import remote
from tests.servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1024 * 1024
SIZE = (1024 if os.environ.get("EVERYWHERE") == "1" else 256) * MIB
"""Several times the memory that either side may use."""


def peak(pid: int | str = "self") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if "VmHWM" in line).split()[1]) * 1024


def reset_peak(pid: int | str = "self") -> int:
    """Reset the peak of a process; return its current memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


@pytest.mark.spec("I3")
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_fifty_clients_with_twenty_runs_each():
    limits = ("--max-sessions", "60", "--max-runs", "1200")
    with ServerProcess(*limits) as server:

        async def client(number: int) -> None:
            async with remote(server, warm=0) as session:
                results = await asyncio.gather(
                    *(session.exec(f"echo {number} {n}; echo {n} >&2; exit {n}") for n in range(20))
                )
                for n, result in enumerate(results):
                    assert result.stdout == f"{number} {n}\n"
                    assert result.stderr == f"{n}\n"
                    assert result.returncode == n

        await asyncio.gather(*(client(n) for n in range(50)))
        assert server.metric("sandbox_runs_started_total") == 1000
        assert server.metric('sandbox_runs_ended_total{reason="exit"}') == 1000
        assert peak(server.pid) < 400 * MIB
        assert server.metric("sandbox_buffer_bytes") == 0


@pytest.mark.spec("I3", "E1")
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_large_file_is_streamed_with_little_memory():
    size, piece = SIZE, 1 * MIB
    pattern = bytes(range(256)) * (piece // 256)
    with ServerProcess("--backend", "none") as server:
        async with remote(server, lazy=False) as session:
            transport = session._transport
            assert transport is not None
            before = reset_peak(), reset_peak(server.pid)

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(size // piece):
                    yield pattern

            assert await transport.write("f", chunks(), mode=0o600, overwrite=True) == size
            digest, total = hashlib.sha256(), 0
            async for chunk in transport.read("f", max_bytes=size):
                digest.update(chunk)
                total += len(chunk)
            after = peak(), peak(server.pid)
            assert total == size
            inside = (await session.exec("sha256sum f")).stdout.split()[0]
            assert digest.hexdigest() == inside
    for earlier, later in zip(before, after, strict=True):
        assert later - earlier < 48 * MIB, "client, server"


def test_peaks_can_be_measured():
    assert peak() > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
