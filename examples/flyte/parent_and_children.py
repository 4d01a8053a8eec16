"""One sandbox, used by several tasks at once; only the task that made it ends it.

python parent_and_children.py
flyte run --local parent_and_children.py parent
"""

import asyncio
from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="family",
    image=flyte.Image.from_debian_base().with_pip_packages("unionai-sandbox[remote]"),
)


@env.task
async def child(sbx: sb.SandboxSession, number: int) -> str:
    """Uses the sandbox of its parent."""
    # A reference: no `async with`. It connects with its first call, and goes when the task does.
    await sbx.exec(f"echo child {number} >> log", check=True)
    return f"child {number}, owner: {sbx.is_owner}"


@env.task
async def parent() -> list[str]:
    """Makes the sandbox, shares it, ends it."""
    async with await sb.session(timeout=timedelta(minutes=15)) as sbx:
        said = await asyncio.gather(child(sbx, 1), child(sbx, 2))
        log = await sbx.get_bytes("log")
        return [*said, *sorted(log.decode().splitlines())]


if __name__ == "__main__":
    print("\n".join(flyte.run(parent).outputs()[0]))
