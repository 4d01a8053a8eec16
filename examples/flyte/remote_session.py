"""A sandbox in its own pod; on a laptop, in its own process.

python remote_session.py
flyte run --local remote_session.py main
flyte run remote_session.py main        (on a cluster, after unionai-sandbox-deploy)
"""

from datetime import timedelta

import flyte

from union import sandbox as sb

env = flyte.TaskEnvironment(
    name="agent",
    image=sb.image_with_sandbox(flyte.Image.from_debian_base()),
)


@env.task
async def main() -> str:
    """Add up the numbers in a file."""
    # session() submits the run and returns; the block starts when the sandbox has an address.
    async with await sb.session(timeout=timedelta(minutes=30)) as sbx:
        await sbx.put_bytes("numbers.txt", b"1\n2\n3\n")
        proc = await sbx.run("awk '{ n += $1 } END { print n }' numbers.txt", stdout=True)
        out, _ = await proc.communicate_text()
        return f"{out.strip()} from {'a pod' if sbx.url else 'a process'}"


if __name__ == "__main__":
    print(flyte.run(main).outputs()[0])
