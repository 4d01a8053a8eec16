"""One sandbox, shared by several tasks; only the task that created it ends it.

python parent_and_children.py
flyte run --local parent_and_children.py parent
"""

import asyncio
from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="family",
    image=sb.image_with_sandbox(flyte.Image.from_debian_base()),
)


@env.task
async def child(sbx: sb.SandboxSession, number: int) -> str:
    """Use the sandbox of the parent task."""
    # A reference needs no `async with`: it connects with its first call and ends with the task.
    await sbx.exec(f"echo child {number} >> log", check=True)
    return f"child {number}, owner: {sbx.is_owner}"


@env.task
async def parent() -> list[str]:
    """Create the sandbox, share it, end it."""
    async with await sb.session(timeout=timedelta(minutes=15)) as sbx:
        replies = await asyncio.gather(child(sbx, 1), child(sbx, 2))
        log = await sbx.get_bytes("log")
        return [*replies, *sorted(log.decode().splitlines())]


if __name__ == "__main__":
    print("\n".join(flyte.run(parent).outputs()[0]))
