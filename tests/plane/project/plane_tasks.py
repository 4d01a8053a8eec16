"""Trivial tasks that the plane is tried with."""

from __future__ import annotations

import asyncio
import os

import flyte
import flyte.remote

env = flyte.TaskEnvironment(
    name="plane_tasks", image="stand-in:1", env_vars={"OF_THE_ENVIRONMENT": "yes"}
)


@env.task
async def double(n: int) -> int:
    print(f"doubling {n}", flush=True)
    return 2 * n


@env.task
async def parent(n: int) -> int:
    """Two sub-actions at once."""
    one, other = await asyncio.gather(double(n), double(n + 1))
    return one + other


@env.task
async def nap(seconds: float) -> str:
    print("asleep", flush=True)
    await asyncio.sleep(seconds)
    return "awake"


@env.task
async def failing() -> str:
    raise ValueError("no good")


@env.task
async def variables(names: list[str]) -> dict[str, str]:
    """What the pod finds in its environment."""
    return {name: os.environ.get(name, "-") for name in names}


@env.task
async def spawns(name_of_run: str) -> str:
    """A run of its own, from inside a task."""
    task = flyte.remote.Task.get("plane_tasks.double", auto_version="latest")
    run = await flyte.with_runcontext(mode="remote", name=name_of_run).run.aio(task, n=4)
    await run.wait.aio(quiet=True)
    return run.name
