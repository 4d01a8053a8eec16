"""A plane with the default sandbox environments, and helpers to inspect it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import flyte
from tests.plane.client import standing_in
from tests.plane.state import phase_name

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.plane.plane import Plane

LONG_S = 40.0
"""A limit that only a hang reaches."""


@contextlib.contextmanager
def sandbox_plane(**options: object) -> Iterator[Plane]:
    """Provide a plane with both default environments; at the end no pod may be left."""
    with standing_in(**options) as plane:
        defaults = (sb.DEFAULT_SANDBOX_ENV, sb.DEFAULT_SANDBOX_ENV_BWRAP)
        flyte.deploy(*defaults, version="1", copy_style="none")
        yield plane
        settled(plane)
    assert not plane.processes()


def settled(plane: Plane) -> None:
    """End all faults and runs after each test."""
    faults = plane.faults
    faults.no_pod, faults.logs_down, plane.store.refused = None, False, None
    faults.waiting = faults.pod_end = None
    faults.log_begins = ()
    faults.start_delay_s = faults.pod_delay_s = faults.log_lag_s = 0.0
    left = [name for name in live_runs(plane) if not soon(plane, name)]
    assert not left, left


async def in_task(task: Any, **inputs: Any) -> Any:
    """Run a task on the plane; return its result."""
    run = await flyte.with_runcontext(mode="remote").run.aio(task, **inputs)
    async with asyncio.timeout(LONG_S):
        await run.wait.aio(quiet=True)
    await run.raise_for_status.aio()
    return (await run.outputs.aio())[0]


def soon(plane: Plane, run: str, *, within_s: float = 5.0) -> bool:
    """Return whether a run has ended, or ends in a moment."""
    end = time.monotonic() + within_s
    while not plane.action(run).is_over and time.monotonic() < end:
        time.sleep(0.02)
    return plane.action(run).is_over


def live_runs(plane: Plane) -> list[str]:
    return [key[2] for key, run in plane.state.runs.items() if not run.root.is_over]


def phase(plane: Plane, run: str) -> str:
    return phase_name(plane.action(run).phase)


async def until(check: Callable[[], object], *, within_s: float = LONG_S) -> float:
    """Wait until a condition holds; return how long that took."""
    begun = time.monotonic()
    while not check():
        assert time.monotonic() - begun < within_s, "it did not happen"
        await asyncio.sleep(0.02)
    return time.monotonic() - begun
