"""Tasks that open sandboxes, pass them on and use what they were passed."""

from __future__ import annotations

import asyncio
import copy
from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(name="plane_sessions", image="stand-in:1")


@env.task
async def opens(name: str) -> str:
    """An owner in a pod."""
    async with await sb.session(name=name, timeout=timedelta(minutes=5)) as sbx:
        return (await sbx.exec("echo from a pod")).stdout


@env.task
async def uses(sbx: sb.SandboxSession, number: int) -> str:
    """A reference in a pod of its own: writes, waits for the other, reads, closes."""
    mine, other = f"{sbx.work_dir}/{number}", f"{sbx.work_dir}/{1 - number}"
    wait = f"for i in $(seq 400); do test -e {other} && break; sleep 0.1; done"
    done = await sbx.exec(f"echo {number} > {mine}; {wait}; cat {other}")
    await sbx.close()
    assert not sbx.is_owner
    return done.stdout.strip()


@env.task
async def shares(name: str) -> list[str]:
    """An owner that passes its session to two sub-actions, which use it at once."""
    async with await sb.session(name=name, timeout=timedelta(minutes=5)) as sbx:
        found = await asyncio.gather(uses(sbx, 0), uses(sbx, 1))
        after = await sbx.exec("echo the owner goes on")
        return [*found, after.stdout.strip()]


@env.task
async def passes_early(name: str) -> str:
    """Passes a session on before it is ready, to a sub-action that has to find it."""
    sbx = await sb.session(name=name, timeout=timedelta(minutes=5))
    try:
        early = copy.copy(sbx)
        assert not early.endpoint
        return await says(early)
    finally:
        await sbx.close()


@env.task
async def says(sbx: sb.SandboxSession) -> str:
    return (await sbx.exec("echo found")).stdout.strip()
